"""The training loop: the reference order of autocast, scale, backward, unscale_, clip, step, update, watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import torch

from ampdbg.config.schema import Config
from ampdbg.environment import describe_environment
from ampdbg.errors import AmpdbgError, UserCodeError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.probes.module_calls import compiled_notes, module_paths
from ampdbg.probes.shadow_trace import sites_of
from ampdbg.probes.tensors import is_finite, nonfinite_in_batch
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.run import Record, Unseen
from ampdbg.replay.investigation import Investigator, OnInvestigated
from ampdbg.replay.replay import shadow_step
from ampdbg.replay.run import Run, prepared, run_pass
from ampdbg.replay.snapshot import Snapshot, take_snapshot
from ampdbg.replay.state import notes_on
from ampdbg.training.half_updates import ComparedUpdates


def train(
    config: Config,
    *,
    observer: Observer = UNOBSERVED,
    command: str = "scan",
    replays: int = 2,
    prepare: Callable[[Config], AbstractContextManager[Run]] = prepared,
) -> Record:
    """Trains the workload of ``config`` under its precision policy and watches every step.

    Args:
        config: a checked config.
        observer: sees each optimizer step, and each replay before it runs.
        command: the name that the record carries.
        replays: at most so many unhealthy steps of each kind are replayed; 0 for none.
        prepare: builds the workload.

    Returns:
        What was seen, not yet diagnosed. An interrupt ends the run early (``interrupted``), and so does an
        error of the user's code that autocast causes (``autocast_error``).

    Raises:
        WorkloadError: a target cannot be used, or the device is not there.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
            Either has the steps that had ended by then as its ``record``.
    """
    started = time.monotonic()
    with prepare(config) as run:
        record = train_prepared(run, observer=observer, command=command, replays=replays)
    return replace(record, elapsed=round(time.monotonic() - started, 3))


def train_prepared(
    run: Run,
    *,
    observer: Observer,
    command: str,
    replays: int,
    on_investigated: OnInvestigated | None = None,
) -> Record:
    """As :func:`train`, on a run that is prepared already and goes on to be used; says nothing of the time it took.

    ``on_investigated`` is called while the weights are still those of the step.
    """
    record = new_record(run, command)
    started = time.monotonic()
    error, failure, interrupted, unseen = None, None, False, Unseen()
    with watch(run.workload.model, run.workload.optimizers, observer.step) as watcher:
        investigator = Investigator(run, watcher, replays, observer, on_investigated)
        updates = ComparedUpdates(run)
        try:
            with run.workload.user.reading("training"):
                for unseen in _steps(run, watcher, investigator, updates):  # noqa: B007 - the last one stays after an interrupt
                    pass
        except KeyboardInterrupt:
            interrupted = True
        except AmpdbgError as raised:
            error = autocast_error(raised, len(watcher.steps), run.workload.model)
            failure = None if error or watcher.calls.explains(raised.__cause__) else raised
            if error is not None:
                investigator.raised()
    model = run.workload.model
    notes = (*compiled_notes(model), *notes_on(model)) if investigator.found else ()
    record = replace(
        record,
        environment=describe_environment(run.config, run.device),
        steps=watcher.steps,
        groups=watcher.groups,
        misuses=watcher.misuses,
        unseen=replace(unseen, notes=(*unseen.notes, *notes, *watcher.notes)),
        interrupted=interrupted,
        error=str(failure or ""),
        autocast_error=error,
        investigations=tuple(investigator.found),
        half_updates=updates.seen,
        elapsed=round(time.monotonic() - started, 3),
    )
    if failure is not None:
        failure.record = record if record.steps else None
        raise failure
    return record


def new_record(run: Run, command: str) -> Record:
    """The record of a run that is about to begin."""
    return Record(
        command=command,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        environment=describe_environment(run.config, run.device),
        config=run.config.resolved(),
        config_folder=run.config.folder_from_start(),
        verdict="inconclusive",
        planned_steps=run.config.train.steps,
    )


def batches_of_steps(run: Run) -> Iterator[tuple[Any, ...]]:
    """The micro-batches of one step after another, without end."""
    batches = run.workload.batches()
    while True:
        yield tuple(next(batches) for _ in range(run.config.train.accumulate))


def _steps(run: Run, watcher: Watch, investigator: Investigator, updates: ComparedUpdates) -> Iterator[Unseen]:
    """Trains the steps; yields what the first one left untouched, after each."""
    scaler = run.mode.scaler()
    unseen = Unseen()
    for number, batches in zip(range(run.config.train.steps), batches_of_steps(run), strict=False):
        snapshot = investigator.snapshot(batches)
        with module_paths(run.workload.model) if number == 0 else nullcontext() as paths:
            loss_is_finite = accumulate_gradients(run, watcher, scaler, batches)
            unseen = paths.unseen() if paths else unseen
        investigator.before_update(snapshot, loss_is_finite, scaler.get_scale())
        updates.before_update()
        update_weights(run, scaler)
        with watcher.paused():
            updates.after_update(number)
        investigator.after_update(snapshot, watcher.steps[-1])
        yield unseen


def accumulate_gradients(run: Run, watcher: Watch, scaler: torch.amp.GradScaler, batches: tuple[Any, ...]) -> bool:
    """Adds up the gradients of one step's micro-batches; returns whether every loss was finite: the one sync a step."""
    for optimizer in run.workload.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for batch in batches:
        watcher.log.batch.extend(nonfinite_in_batch(batch))
    cast = [run.mode.cast(batch) for batch in batches]
    losses = run_pass(run.workload, cast, run.mode.forward, scaled=scaler.scale, seen=watcher.log.add_losses)
    return is_finite(torch.stack([loss for each in losses for loss in each.values()]))


def update_weights(run: Run, scaler: torch.amp.GradScaler) -> None:
    """Unscales and clips where asked, then lets the scaler step or skip."""
    with run.workload.user.running("the optimizer's step"):
        run.mode.step(scaler, run.workload.optimizers, run.config.train.clip_grad_norm)


def profile_ranges(config: Config, *, observer: Observer = UNOBSERVED) -> Record:
    """Trains ``train.steps - 1`` steps as configured and measures the ranges of the next.

    Args:
        config: a checked config.
        observer: sees each optimizer step.

    Returns:
        A record with ``sites``, not yet diagnosed; after an interrupt without them.

    Raises:
        WorkloadError: a target cannot be used, or the device is not there.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
    """
    started = time.monotonic()
    with prepared(config) as run:
        record = new_record(run, "ranges")
        with watch(run.workload.model, run.workload.optimizers, observer.step) as watcher:
            seen = _ranges_of_last_step(run, watcher)
        record = replace(record, steps=watcher.steps, groups=watcher.groups, **seen)
    return replace(record, elapsed=round(time.monotonic() - started, 3))


def _ranges_of_last_step(run: Run, watcher: Watch) -> dict[str, Any]:
    """The record's keys that the step, or what kept it from ending, has to fill."""
    try:
        snapshot = _up_to_last_step(run, watcher)
        with watcher.paused():
            ranges, unseen = shadow_step(run, snapshot)
    except KeyboardInterrupt:
        return {"interrupted": True}
    except UserCodeError as raised:
        error = autocast_error(raised, len(watcher.steps), run.workload.model)
        if error is None:
            raise
        return {"autocast_error": error}
    return {"sites": sites_of(ranges), "unseen": unseen}


def _up_to_last_step(run: Run, watcher: Watch) -> Snapshot:
    """Trains all steps but the last, which is about to run then."""
    scaler, last = run.mode.scaler(), run.config.train.steps - 1
    every = batches_of_steps(run)
    for _ in range(last):
        accumulate_gradients(run, watcher, scaler, next(every))
        update_weights(run, scaler)
    return take_snapshot(run.workload.model, last, next(every))
