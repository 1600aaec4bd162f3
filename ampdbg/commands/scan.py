"""``ampdbg scan``: trains a few steps under autocast and GradScaler, watches each, explains what went wrong."""

from __future__ import annotations

from ampdbg import api
from ampdbg.errors import EXIT_FOUND, EXIT_HEALTHY, EXIT_INTERRUPTED
from ampdbg.given import read_given
from ampdbg.record.run import Record

from . import options, progress
from .options import FailOn
from .output import results_only, show

SEVERITIES: dict[FailOn, set[str]] = {"error": {"error"}, "warning": {"error", "warning"}, "never": set()}


def command(
    config: options.ConfigFile,
    steps: options.Steps = None,
    device: options.Device = None,
    policy: options.PolicyChoice = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    replays: options.Replays = 2,
    record: options.RecordFile = None,
    json: options.Json = False,
    fail_on: options.FailOnChoice = "warning",
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Train a few steps, explain what went wrong.

    Runs the workload of CONFIG under autocast and GradScaler and watches every step.
    """
    with results_only() as stdout:
        given = read_given(config, **options.changes(steps, device, policy, seed, settings))
        with progress.shown(quiet) as observer:
            scanned = api.scan(given, replays=replays, observer=observer)
        show(scanned, given, stdout, asked_for=record, as_json=json)
    return exit_code(scanned, fail_on)


def exit_code(record: Record, fail_on: FailOn) -> int:
    """130 when interrupted, 1 when a finding is at least as severe as ``fail_on``, else 0."""
    if record.interrupted:
        return EXIT_INTERRUPTED
    found = any(finding.severity in SEVERITIES[fail_on] for finding in record.findings)
    return EXIT_FOUND if found else EXIT_HEALTHY
