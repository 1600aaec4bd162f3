"""Which steps are replayed: the first unhealthy ones that differ, and the last step of a run that looks healthy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ampdbg.calibration import SKIPS_IN_A_ROW
from ampdbg.observer import Observer
from ampdbg.probes.tensors import is_finite
from ampdbg.probes.watch import Watch
from ampdbg.record.replays import Investigation, Producer
from ampdbg.record.run import Step
from ampdbg.replay.investigation import Why, investigate
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot, take_snapshot

OnInvestigated = Callable[[Snapshot, float, Investigation], None]
"""Called with a step that was replayed, its loss scale and what came of it, while the weights are still its own."""


class Investigator:
    """Replays steps of one run, at most ``limit`` of each kind, and no third one with the same root."""

    def __init__(
        self, run: Run, watcher: Watch, limit: int, observer: Observer, on_investigated: OnInvestigated
    ) -> None:
        self.found: list[Investigation] = []
        self._run = run
        self._watcher = watcher
        self._limit = limit
        self._observer = observer
        self._on_investigated = on_investigated
        self._is_low = run.mode.dtype is not torch.float32
        self._versions = Versions()
        first = self.snapshot(())
        self._first = replace(first, attributes=first.attributes.settled())
        self._tried: Counter[Why] = Counter()
        self._skips_in_a_row = 0
        self._lowest_that_worked = math.inf

    def snapshot(self, batches: tuple[Any, ...]) -> Snapshot:
        """The step that is about to run, with its batches."""
        return take_snapshot(self._run.workload.model, len(self._watcher.steps), batches, self._versions)

    def before_update(self, snapshot: Snapshot, loss_is_finite: bool, scale: float) -> None:
        """To be called between the backward pass and the optimizer: the last moment with the step's weights."""
        is_last = snapshot.step + 1 == self._run.config.train.steps
        if not loss_is_finite:
            self._investigate(snapshot, "loss", scale)
        elif (
            is_last
            and self._is_low
            and self._skips_in_a_row == 0
            and not any(made.why == "loss" for made in self.found)
        ):
            self._investigate(snapshot, "end", scale)

    def after_update(self, snapshot: Snapshot, step: Step) -> None:
        """To be called after the update: a step that the scaler withheld still has its weights."""
        if not step.skipped:
            self._skips_in_a_row = 0
            self._lowest_that_worked = min(self._lowest_that_worked, step.scale)
        else:
            self._skips_in_a_row += 1
            # A skip right after growth is normal; one at a scale that has worked is looked at.
            is_new_low = self._skips_in_a_row == 1 and step.scale <= self._lowest_that_worked < math.inf
            if math.isfinite(step.loss) and (is_new_low or self._skips_in_a_row == SKIPS_IN_A_ROW):
                self._investigate(snapshot, "gradients", step.scale)
        if self.found and self.found[-1].step == step.step:
            self.found[-1] = replace(self.found[-1], loss=step.loss)

    def _investigate(self, snapshot: Snapshot, why: Why, scale: float) -> None:
        before = [made for made in self.found if made.why == why]
        same_root = len(before) > 1 and _root(before[-1]) == _root(before[-2])
        if self._tried[why] >= self._limit or same_root or not self._weights_are_finite():
            return
        self._tried[why] += 1
        steps = self._watcher.steps[: snapshot.step]
        unpoisoned = self._unpoisoned(snapshot)
        with self._watcher.paused():
            made = investigate(self._run, unpoisoned, why, scale, before=steps, observer=self._observer)
            if made.reproduced == 0 and unpoisoned is not snapshot and self.found:
                return  # it went wrong by what the step that was found first has left behind
            self._on_investigated(unpoisoned, scale, made)
        self.found.append(made)

    def _unpoisoned(self, snapshot: Snapshot) -> Snapshot:
        """The step with what an earlier one has spoilt as the run began: replays show how it comes."""
        first = self._first
        attributes = snapshot.attributes.unpoisoned(first.attributes)
        spoilt = {name for name, buffer in snapshot.buffers.items() if name in first.buffers and not is_finite(buffer)}
        if attributes is snapshot.attributes and not spoilt:
            return snapshot
        buffers = {name: (first if name in spoilt else snapshot).buffers[name] for name in snapshot.buffers}
        return replace(snapshot, buffers=buffers, attributes=attributes)

    def _weights_are_finite(self) -> bool:
        """Where weights are not finite, they are what is wrong, and no replay says more."""
        return all(is_finite(parameter) for parameter in self._run.workload.model.parameters())


def _root(made: Investigation) -> tuple[Any, ...] | None:
    producer: Producer | None = next(iter(made.replays[0].producers), None)
    return None if producer is None else (producer.phase, producer.module, producer.op, producer.source)
