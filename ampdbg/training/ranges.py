"""The range profile of one training step: trains up to it, then runs it as the wide shadow."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ampdbg.config import Config
from ampdbg.errors import UserCodeError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.probes.shadow_trace import sites_of
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.run import Record
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.shadow import shadow_and_unseen
from ampdbg.replay.snapshot import Snapshot, take_snapshot
from ampdbg.training.loop import accumulate_gradients, batches_of_steps, new_record, update_weights


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
            seen = _seen(run, watcher)
        record = replace(record, steps=watcher.steps, groups=watcher.groups, **seen)
    return replace(record, elapsed=round(time.monotonic() - started, 3))


def _seen(run: Run, watcher: Watch) -> dict[str, Any]:
    """The record's keys that the step, or what kept it from ending, has to fill."""
    try:
        snapshot = _trained(run, watcher)
        with watcher.paused():
            ranges, unseen = shadow_and_unseen(run, snapshot)
    except KeyboardInterrupt:
        return {"interrupted": True}
    except UserCodeError as raised:
        error = autocast_error(raised, step=len(watcher.steps))
        if error is None:
            raise
        return {"autocast_error": error}
    return {"sites": sites_of(ranges), "unseen": unseen}


def _trained(run: Run, watcher: Watch) -> Snapshot:
    """Trains all steps but the last, which is about to run then."""
    scaler, last = run.mode.scaler(), run.config.train.steps - 1
    every = batches_of_steps(run)
    for _ in range(last):
        accumulate_gradients(run, watcher, scaler, next(every))
        update_weights(run, scaler)
    return take_snapshot(run.workload.model, last, next(every))
