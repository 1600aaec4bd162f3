"""``ampdbg scan``: trains a few steps under autocast and GradScaler, watches each, explains what went wrong."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ampdbg.errors import EXIT_FOUND, EXIT_HEALTHY, EXIT_INTERRUPTED, AmpdbgError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.record.file import to_json
from ampdbg.record.run import Record

from . import options, progress
from .config_sources import config_of_yaml
from .options import FailOn, as_overrides, as_typed
from .record_files import tell_unsaved, try_to_save
from .terminal import Look, look_of, results_only, shown_as, write_result

SEVERITIES = {FailOn.error: {"error"}, FailOn.warning: {"error", "warning"}, FailOn.never: set[str]()}


def scan(
    config: str | Path,
    *,
    steps: int | None = None,
    device: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    observer: Observer = UNOBSERVED,
    replays: int = 2,
) -> Record:
    """Trains ``steps`` steps of the config's workload and returns the diagnosed record; writes no file.

    ``device``, ``policy`` and ``seed`` replace the config's own, ``overrides`` any key ("dotted.key=YAML value").
    ``observer`` sees the run as it goes on; at most ``replays`` unhealthy steps of each kind are replayed.
    An interrupt ends the run early: the record holds what was seen, with ``interrupted`` set.

    Raises:
        ConfigError: the config is missing or holds mistakes.
        WorkloadError: a target cannot be found or used.
        UserCodeError: the workload's own code raised; ``record`` of the error has the steps before it, diagnosed.
    """
    checked = config_of_yaml(Path(config), as_overrides(steps, device, policy, seed, overrides))
    observer.start(checked.train.steps)
    # Only now: importing torch takes seconds, and a mistake in the config must not.
    from ampdbg.diagnosis.diagnose import diagnose
    from ampdbg.training.loop import train

    with diagnosed("scan"):
        return diagnose(train(checked, observer=observer, replays=replays))


@contextlib.contextmanager
def diagnosed(command: str) -> Iterator[None]:
    """An error carries the record of the steps before it, diagnosed, as the ``command``'s own."""
    try:
        yield
    except AmpdbgError as error:
        if isinstance(error.record, Record):
            from ampdbg.diagnosis.diagnose import diagnose

            error.record = replace(diagnose(error.record), command=command)
        raise


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
    fail_on: options.FailOnChoice = FailOn.warning,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Train a few steps, explain what went wrong.

    Runs the workload of CONFIG under autocast and GradScaler and watches every step.
    """
    look = look_of(sys.stdout)
    typed = as_typed(shlex.quote(str(config)), steps, device, policy, seed, settings or ())
    with results_only() as result:
        with progress.shown(quiet) as observer:
            seen = scan(
                config,
                steps=steps,
                device=device,
                policy=policy.value if policy else None,
                seed=seed,
                overrides=settings or (),
                observer=observer,
                replays=replays,
            )
        written, failure = try_to_save(seen, record)
        write_result(to_json(seen) if json else _report(seen, look, typed, written), result)
    tell_unsaved(failure, record)
    return exit_code(seen, fail_on)


def exit_code(record: Record, fail_on: FailOn) -> int:
    """130 when interrupted, 1 when a finding is at least as severe as ``fail_on``, else 0."""
    if record.interrupted:
        return EXIT_INTERRUPTED
    found = any(finding.severity in SEVERITIES[fail_on] for finding in record.findings)
    return EXIT_FOUND if found else EXIT_HEALTHY


def _report(seen: Record, look: Look, typed: str, written: Path | None) -> str:
    from ampdbg.report.text import render_text

    return render_text(
        seen,
        **shown_as(look, typed, written),
    )
