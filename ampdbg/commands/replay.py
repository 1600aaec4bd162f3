"""``ampdbg replay``: a captured step, run again in the script that it is of."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from ampdbg import api
from ampdbg.errors import ConfigError
from ampdbg.given import read_given

from . import options, progress
from .output import results_only, show
from .scan import exit_code


@functools.partial(options.with_run_options, but=options.OF_A_CONFIG)
def command(
    config: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture that ampdbg run has written.")],
    script: options.ScriptToStart = "",
    *,
    run: options.RunOptions,
) -> int:
    """Run a captured step again, and explain it.

    Starts the script of CAPTURE again, puts the captured step into its model, and ends it there. What the script does
    up to its first step like the captured one, such as to make its folder or to begin its log, it does again.
    """
    with results_only() as stdout:
        given = read_given(config, None, script)
        if given.capture is None:
            raise ConfigError(f"{config}: not a capture; ampdbg run writes captures to .ampdbg/captures")
        with progress.shown(run.quiet) as observer:
            replayed = api.replay(given, observer=observer)
        show(replayed, given, stdout, run=run)
    return exit_code(replayed, "warning")
