"""``ampdbg scan``: train a few steps under autocast and GradScaler, watch each, and explain the failures."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ampdbg import api
from ampdbg.errors import EXIT_FOUND, EXIT_HEALTHY, EXIT_INTERRUPTED
from ampdbg.given import read_given
from ampdbg.record.run import Record

from . import options, progress
from .output import show
from .source_findings import say_source_findings
from .streams import results_only

FailOn = Literal["error", "warning", "never"]

SEVERITIES: dict[FailOn, set[str]] = {"error": {"error"}, "warning": {"error", "warning"}, "never": set()}


@options.with_run_options
def command(
    config: options.OptionalConfig = None,
    replays: Annotated[
        int,
        typer.Option("--replays", metavar="N", min=0, help="Replay at most N failing steps of each kind; 0 for none."),
    ] = 2,
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="The least severity that makes the exit code 1.")
    ] = "warning",
    *,
    run: options.RunOptions,
) -> int:
    """Train a few steps, and explain what fails.

    Trains the workload of CONFIG under autocast and GradScaler, and watches every step.
    """
    with results_only() as stdout:
        given = read_given(options.config_or_default(config), **run.changes)
        with progress.shown(run.quiet) as observer:
            scanned = api.scan(given, replays=replays, observer=observer)
        show(scanned, given, stdout, run=run)
        say_source_findings(scanned, given.config.target_files(), is_quiet=run.quiet)
    return exit_code(scanned, fail_on)


def exit_code(record: Record, fail_on: FailOn) -> int:
    """Return 130 if interrupted, 1 if a finding is at least as severe as ``fail_on``, else 0."""
    if record.interrupted:
        return EXIT_INTERRUPTED
    found = any(finding.severity in SEVERITIES[fail_on] for finding in record.findings)
    return EXIT_FOUND if found else EXIT_HEALTHY
