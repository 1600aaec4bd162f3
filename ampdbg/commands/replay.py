"""``ampdbg replay``: replay a captured step in its own script."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from ampdbg import api
from ampdbg.errors import ConfigError
from ampdbg.given import read_given

from . import options, progress
from .output import show
from .scan import exit_code
from .streams import results_only


@functools.partial(options.with_run_options, but=options.OF_A_CONFIG)
def command(
    config: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture that ampdbg run has written.")],
    script: options.ScriptToStart = "",
    *,
    run: options.RunOptions,
) -> int:
    """Replay a captured step, and explain it.

    Restarts the script of CAPTURE up to its first step like the captured one. There it restores the captured step,
    replays it, and ends the script. Existing files are never changed.
    """
    with results_only() as stdout:
        given = read_given(config, None, script)
        if given.capture is None:
            raise ConfigError(f"{config}: not a capture; ampdbg run writes captures to .ampdbg/captures")
        with progress.shown(run.quiet) as observer:
            replayed = api.replay(given, observer=observer)
        show(replayed, given, stdout, run=run)
    return exit_code(replayed, "warning")
