"""``ampdbg ranges``: how close each op and gradient of a step is to FP16's limits, and which loss scales work."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ampdbg import api
from ampdbg.given import read_given
from ampdbg.report.view import Order

from . import options, progress
from .output import show
from .scan import exit_code
from .streams import results_only


@options.with_run_options
def command(
    config: options.StepOrConfig = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Train up to the N-th step, and measure that one.")
    ] = 1,
    order: Annotated[Order, typer.Option("--order", help="The order of the listed sites.")] = "tightest",
    top: Annotated[
        int | None, typer.Option("--top", metavar="N", min=1, help="How many sites and modules to list.")
    ] = None,
    script: options.ScriptToStart = "",
    *,
    run: options.RunOptions,
) -> int:
    """Show how close one step is to FP16's limits.

    Lists the tightest ops and gradients of CONFIG's first step, and the loss scales that would work. Of a run in
    bfloat16 it says first whether it would train in FP16, and what has to be pinned.
    """
    with results_only() as stdout:
        # The default of one step must not make a scan run only one step.
        changes = replace(run, steps=steps if steps > 1 else None).changes
        given = read_given(options.config_or_default(config), None, script, **changes)
        with progress.shown(run.quiet) as observer:
            measured = api.ranges(given, observer=observer)
        show(measured, given, stdout, run=run, order=order, top=top)
    return exit_code(measured, "warning")
