"""Which steps are replayed: the first unhealthy ones that differ, and the last step of a run that looks healthy."""

from __future__ import annotations

import math
from typing import Any

from ampdbg.calibration import SKIPS_IN_A_ROW, settling_steps
from ampdbg.probes.watch import Watch
from ampdbg.record import Investigation, Producer, Step
from ampdbg.training.investigation import Why, investigate
from ampdbg.training.run import Run
from ampdbg.training.snapshot import Snapshot, take_snapshot


class Investigator:
    """Replays steps of one run, at most ``limit`` of each kind, and no second one with the same root."""

    def __init__(self, run: Run, watcher: Watch, limit: int) -> None:
        self.found: list[Investigation] = []
        self._run = run
        self._watcher = watcher
        self._limit = limit
        self._settled = settling_steps(run.config.train.steps)
        self._skips_in_a_row = 0
        self._lowest_that_worked = math.inf

    def snapshot(self, batches: tuple[Any, ...]) -> Snapshot:
        """The step that is about to run, with its batches."""
        return take_snapshot(self._run.workload.model, len(self._watcher.steps), batches)

    def before_update(self, snapshot: Snapshot, loss_is_finite: bool, scale: float) -> None:
        """To be called between the backward pass and the optimizer: the last moment with the step's weights."""
        is_last = snapshot.step + 1 == self._run.config.train.steps
        if not loss_is_finite:
            self._investigate(snapshot, "loss", scale)
        elif is_last and not self.found and self._skips_in_a_row == 0:
            self._investigate(snapshot, "end", scale)

    def after_update(self, snapshot: Snapshot, step: Step) -> None:
        """To be called after the update: a step that the scaler withheld still has its weights."""
        if not step.skipped:
            self._skips_in_a_row = 0
            self._lowest_that_worked = min(self._lowest_that_worked, step.scale)
            return
        self._skips_in_a_row += 1
        is_new_low = step.scale <= self._lowest_that_worked < math.inf and snapshot.step >= self._settled
        if math.isfinite(step.loss) and (is_new_low or self._skips_in_a_row >= SKIPS_IN_A_ROW):
            self._investigate(snapshot, "gradients", step.scale)

    def _investigate(self, snapshot: Snapshot, why: Why, scale: float) -> None:
        before = [made for made in self.found if made.why == why]
        same_root = len(before) > 1 and _root(before[-1]) == _root(before[-2])
        if len(before) < self._limit and not same_root:
            with self._watcher.paused():
                self.found.append(investigate(self._run, snapshot, why, scale))


def _root(made: Investigation) -> tuple[Any, ...] | None:
    producer: Producer | None = next(iter(made.replays[0].producers), None)
    return None if producer is None else (producer.phase, producer.module, producer.op, producer.source)
