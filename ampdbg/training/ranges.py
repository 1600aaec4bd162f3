"""The range profile of one training step: trains up to it, then runs it as the wide shadow."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from ampdbg.config import Config
from ampdbg.environment import describe_environment, folder_from_here
from ampdbg.errors import UserCodeError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.probes.shadow_trace import sites_of
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.run import Record
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.shadow import shadow_and_unseen
from ampdbg.replay.snapshot import take_snapshot
from ampdbg.training.loop import accumulate_gradients, update_weights


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
        record = Record(
            command="ranges",
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            environment=describe_environment(config, run.device),
            config=config.resolved(),
            config_folder=folder_from_here(config),
            verdict="inconclusive",
            planned_steps=config.train.steps,
        )
        with watch(run.workload.model, run.workload.optimizers, observer.step) as watcher:
            seen = _seen(run, watcher)
        record = replace(record, steps=watcher.steps, groups=watcher.groups, **seen)
    return replace(record, elapsed=round(time.monotonic() - started, 3))


def _seen(run: Run, watcher: Watch) -> dict[str, Any]:
    """The record's keys that the step, or what kept it from ending, has to fill."""
    try:
        ranges, unseen = shadow_and_unseen(run, take_snapshot(run.workload.model, *_trained(run, watcher)))
    except KeyboardInterrupt:
        return {"interrupted": True}
    except UserCodeError as raised:
        error = autocast_error(raised, step=len(watcher.steps))
        if error is None:
            raise
        return {"autocast_error": error}
    return {"sites": sites_of(ranges), "unseen": unseen}


def _trained(run: Run, watcher: Watch) -> tuple[int, tuple[Any, ...]]:
    """Trains all steps but the last; returns the number of that one and its batches."""
    scaler = run.mode.scaler()
    batches = run.workload.batches()
    last = run.config.train.steps - 1
    for _ in range(last):
        accumulate_gradients(run, watcher, scaler, _next(run, batches))
        update_weights(run, scaler)
    return last, _next(run, batches)


def _next(run: Run, batches: Any) -> tuple[Any, ...]:
    return tuple(next(batches) for _ in range(run.config.train.accumulate))
