"""A script's run as a record: watched to its end; after a step that went wrong the next is traced as it trains."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import torch

from ampdbg.errors import first_line
from ampdbg.probes.op_trace import placed
from ampdbg.probes.step_trace import StepTrace
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Investigation, Record, Replay, ScriptRun, Step
from ampdbg.replay.comparison import producers_in_place
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.launch import Script, ScriptEnd, run_script, told_before_sigterm

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
                del self.found[MOST_FOUND : MOST_FOUND - MOST_KEPT]
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


# The script


def watch_script(script: Script, *, emulate: bool, ended: Callable[[Record], None]) -> Record:
    """Runs the script and watches every optimizer and scaler that it makes.

    Args:
        script: what to run.
        emulate: on a machine without a GPU, it finds one, emulated.
        ended: called with the record where SIGTERM ends the script, a moment before the process does.

    Returns:
        What was seen, not yet diagnosed.

    Raises:
        SystemExit: in a child that the script has forked, which is to end as it would, and to say nothing.
    """
    owner, watcher = os.getpid(), Watch(None, ())
    traced = TracedSteps(watcher)
    watcher.ended = traced.step_ended
    with ExitStack() as stack:
        if emulate:
            stack.enter_context(emulated_gpu())
        stack.enter_context(told_before_sigterm(lambda: ended(_record(script, watcher, traced, ScriptEnd(143)))))
        with watcher:
            try:
                ending = run_script(script)
            finally:
                traced.end()
        if os.getpid() != owner:
            raise SystemExit(ending.code)
        if ending.error is not None:
            watcher.calls.failed(ending.error)
        return _record(script, watcher, traced, ending)


def _record(script: Script, watcher: Watch, traced: TracedSteps, ending: ScriptEnd) -> Record:
    error, interrupted = ending.error, isinstance(ending.error, KeyboardInterrupt)
    by_autocast = autocast_error(error, watcher.log.closed(), watcher.models.named_modules())
    raised = error is not None and not interrupted and by_autocast is None and not watcher.calls.explains(error)
    return replace(
        watcher.record(),
        command="run",
        script=ScriptRun(script.name, script.arguments, script.is_module, ending.code),
        investigations=tuple(traced.found),
        interrupted=interrupted,
        autocast_error=by_autocast,
        error=f"the script raised {type(error).__name__}: {first_line(error)}" if error is not None and raised else "",
    )
