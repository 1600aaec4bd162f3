"""``ampdbg cost``: compare the levels of precision: how each trains, and what a step costs."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdbg import api
from ampdbg.errors import EXIT_HEALTHY, EXIT_INTERRUPTED
from ampdbg.given import read_given
from ampdbg.quantities import byte_count

from . import options, progress
from .output import show
from .streams import results_only


def _checked_size(value: str | None) -> str | None:
    try:
        if value is not None:
            byte_count(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


@options.with_run_options
def command(
    config: options.OptionalConfig = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--batch-size",
            "--memory",
            metavar="SIZE",
            callback=_checked_size,
            help="Also find the largest batch that fits into this much memory, such as 16GiB.",
        ),
    ] = None,
    *,
    run: options.RunOptions,
) -> int:
    """Compare what each precision level takes.

    Trains CONFIG in FP32, O1, O1 with pins, O2, O3 and bfloat16. Shows which of them train as FP32 does, and the
    memory and FLOPs of a step. On a GPU it shows the time of a step too.
    """
    with results_only() as stdout:
        given = read_given(options.config_or_default(config), **run.changes)
        with progress.shown(run.quiet) as observer:
            compared = api.cost(given, memory=memory, observer=observer)
        show(compared, given, stdout, run=run)
    return EXIT_INTERRUPTED if compared.interrupted else EXIT_HEALTHY
