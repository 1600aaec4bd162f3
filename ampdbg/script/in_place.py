"""Steps traced where they train: after one that went wrong, the next; what goes wrong in it is known by op and line."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Literal

import torch

from ampdbg.probes.op_trace import placed
from ampdbg.probes.step_trace import StepTrace
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Investigation, Replay, Step
from ampdbg.replay.comparison import producers_in_place

MOST_TRACED = 6
"""So many steps are traced at most, each of which takes several times as long as it would."""

REST = 10
"""So many healthy steps allow one more: the scale that collapses in the night has settled before."""

MOST_FOUND = 2
"""So many traced steps that went wrong are enough of each row of bad ones."""

MOST_KEPT = 16
"""So many are kept: the first row, and of the others the last."""


class TracedSteps:
    """Arms a trace when a step has gone wrong, and reads it when the next one ends."""

    def __init__(self, watcher: Watch) -> None:
        self.found: list[Investigation] = []
        self._watcher = watcher
        self._left = MOST_TRACED
        self._in_a_row, self._healthy = 0, 0
        self._entered: ExitStack | None = None
        self._trace: StepTrace | None = None

    def step_ended(self, is_bad: bool) -> None:
        """To be called when a step has ended."""
        trace, self._trace = self._trace, None
        self.end()
        if trace is not None:
            step = self._watcher.log.latest()
            if step.found_inf or not math.isfinite(step.loss):
                self._in_a_row += 1
                self.found.append(_investigation(step, trace))
                del self.found[MOST_FOUND : 1 - MOST_KEPT + MOST_FOUND]
        if not is_bad:
            self._in_a_row, self._healthy = 0, self._healthy + 1
            self._left = min(MOST_TRACED, self._left + (self._healthy % REST == 0))
        elif self._left and self._in_a_row < MOST_FOUND:
            self._begin()

    def end(self) -> None:
        """Leaves torch and the models as they were."""
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.close()

    def _begin(self) -> None:
        # A mode of the script's own that is entered now would be left before ours: torch pops them in order.
        if torch._C._len_torch_dispatch_stack():
            return
        self._left -= 1
        self._entered = ExitStack()
        self._trace = self._entered.enter_context(placed(self._watcher.models.together(), StepTrace))


def _investigation(step: Step, trace: StepTrace) -> Investigation:
    dtype = next((seen.output.dtype for seen in trace.ops if seen.output.dtype in ("float16", "bfloat16")), "float32")
    replay = Replay(
        dtype=dtype,
        scale=step.scale,
        loss=step.loss,
        grad_norm=step.grad_norm if step.grad_norm is not None else 0.0,
        gradients=tuple(one.name for group in step.groups for one in group.parameters),
    )
    why: Literal["loss", "gradients"] = "gradients" if math.isfinite(step.loss) else "loss"
    return Investigation(step.step, why, (producers_in_place(replay, trace),), loss=step.loss)
