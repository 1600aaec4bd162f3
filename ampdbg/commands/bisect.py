"""``ampdbg bisect``: find by experiment the smallest set of modules that must run in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampdbg import api
from ampdbg.errors import EXIT_FOUND
from ampdbg.given import read_given
from ampdbg.record.run import Record

from . import options, progress, scan
from .output import show
from .streams import results_only


@options.with_run_options
def command(
    config: options.StepOrConfig = None,
    module: Annotated[
        Path | None, typer.Option("--module", metavar="FILE", help="A Python file with build_model and build_data.")
    ] = None,
    strategy: options.SearchingChoice = "guided",
    max_trials: options.MaxTrials = None,
    script: options.ScriptToStart = "",
    *,
    run: options.RunOptions,
) -> int:
    """Find the fewest modules that need FP32.

    Trains CONFIG, or the model of --module FILE, until a step fails. Replays that step with sets of modules in FP32.
    """
    with results_only() as stdout:
        with progress.shown(run.quiet, max_trials) as observer:
            taken = config if module is not None else options.default_config(config)
            # This imports the module, which may change the folder.
            given = read_given(taken, module, script, **run.changes)
            searched = api.bisect(given, strategy=strategy, max_trials=max_trials, observer=observer)
        show(searched, given, stdout, run=run)
    return exit_code(searched)


def exit_code(record: Record) -> int:
    """Return 130 if interrupted, 0 if nothing is wrong, else 1: a set to pin, or a fault that no pin cures."""
    code = scan.exit_code(record, "warning")
    if record.interrupted or record.search is None or record.search.outcome == "nothing-to-pin":
        return code
    return EXIT_FOUND
