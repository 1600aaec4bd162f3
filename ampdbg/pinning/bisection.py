"""From a config to the smallest set of pins: train until a step fails, then run that step with sets of pins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.pinning.pin_search import search_pins
from ampdbg.quantities import counted
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.pins import Outcome, Search, Strategy
from ampdbg.record.replays import Investigation
from ampdbg.record.run import Record
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, Snapshot, failing_step, weights_of
from ampdbg.training.loop import train_prepared

REPLAYED_STEPS = 2
"""At most so many unhealthy steps of each kind are replayed, and kept, while the run is trained."""

Kept = dict[tuple[int, str], FailingStep]


@dataclass(frozen=True)
class Bisected:
    """A search that has ended, while its run still stands. ``failing`` are the steps that the set has to cure."""

    run: Run
    record: Record
    failing: tuple[FailingStep, ...]


def bisect_run(
    config: Config,
    *,
    strategy: Strategy = "guided",
    max_trials: int | None = None,
    observer: Observer = UNOBSERVED,
) -> Record:
    """Trains the workload of ``config``, and finds the smallest set of modules that cures the steps that fail.

    Args:
        config: a checked config.
        strategy: ``guided`` by the wide shadow, ``ddmin`` blind over the module tree.
        max_trials: no more experiments than that.
        observer: sees steps and replays, and the search; that begins again where a step turns out to fail only
            sometimes.

    Returns:
        The diagnosed record with ``pins``, ``trials`` and ``search``; after an interrupt the best set so far.

    Raises:
        WorkloadError: a target cannot be used, or the device is not there.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
    """
    with bisected(config, strategy, max_trials, observer) as ended:
        return ended.record


@contextlib.contextmanager
def bisected(
    config: Config,
    strategy: Strategy,
    max_trials: int | None,
    observer: Observer,
) -> Iterator[Bisected]:
    """As :func:`bisect_run`, for what has to be done with the run after the search."""
    started = time.monotonic()
    kept: Kept = {}
    with prepared(config) as run:

        def keep(snapshot: Snapshot, scale: float, made: Investigation) -> None:
            kept[made.step, made.why] = failing_step(run.workload.model, snapshot, scale, made)

        trained = train_prepared(run, observer=observer, command="bisect", replays=REPLAYED_STEPS, on_investigated=keep)
        record = diagnose(trained)
        failing = _failing_steps(record, kept)
        if not record.interrupted:
            search = _without_a_search(record, failing, strategy)
            record = replace(record, search=search)
            if search is None:
                record = _searched(run, record, failing, strategy, max_trials, observer)
        yield Bisected(run, replace(record, elapsed=round(time.monotonic() - started, 3)), tuple(failing))


def _searched(
    run: Run,
    record: Record,
    failing: Sequence[FailingStep],
    strategy: Strategy,
    max_trials: int | None,
    observer: Observer,
) -> Record:
    try:
        with weights_of(run.workload.model, failing[0]):
            return search_pins(run, record, failing, strategy=strategy, max_trials=max_trials, observer=observer)
    except KeyboardInterrupt:  # before the first trial has ended
        return replace(record, interrupted=True)


def _failing_steps(record: Record, kept: Mapping[tuple[int, str], FailingStep]) -> list[FailingStep]:
    """The kept steps that a finding of precision is about, the root's first; all that fails is to be cured."""
    located = [finding for finding in record.findings if finding.op or finding is record.findings[0]]
    steps = dict.fromkeys(finding.replayed_step for finding in located if CODES[finding.code].pin_helps)
    return [failing for step in steps for (number, _), failing in kept.items() if number == step]


def _without_a_search(record: Record, failing: Sequence[FailingStep], strategy: Strategy) -> Search | None:
    """What there is to say where no experiment is needed; None where there is one to make."""
    root = next((finding for finding in record.findings if finding.severity != "info"), None)
    if root is None:
        return Search(strategy, "nothing-to-pin", f"none of {counted(len(record.steps), 'step')} failed")
    if CODES[root.code].fails_in_fp32:
        return _because_of(strategy, "fp32-fails", root)
    if record.verdict == "other" or not CODES[root.code].pin_helps:
        return _because_of(strategy, "no-pin-helps", root)
    return None if failing else _because_of(strategy, "not-reproduced", root)


def _because_of(strategy: Strategy, outcome: Outcome, root: Finding) -> Search:
    return Search(strategy, outcome, f"{root.message}; {root.remedy}" if root.remedy else root.message)
