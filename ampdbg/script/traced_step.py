"""One step of a loop that is not ours, traced while it trains and taped: where it goes wrong it is captured, and run
again as the step of a config would be."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import get_args

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.agreement import is_finite
from ampdbg.observer import Observer
from ampdbg.probes.op_trace import placed
from ampdbg.probes.optimizers import innermost
from ampdbg.probes.step_trace import StepTrace
from ampdbg.probes.tensors import are_weights_spoilt, nonfinite
from ampdbg.probes.unfollowed import note_mode_left
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Investigation, Replay, Step
from ampdbg.replay.comparison import producers_in_place
from ampdbg.replay.investigation import Why
from ampdbg.replay.pass_buffers import is_computed_with
from ampdbg.replay.step_data import data_of
from ampdbg.replay.tape import Tape, taping
from ampdbg.script.captures import Captures
from ampdbg.script.loop_step import RUN_AGAIN, LoopStep
from ampdbg.script.played_run import Half
from ampdbg.script.ranks import hooks_half_weights, is_in_group
from ampdbg.script.signals import held_signals


class TracedStep:
    """The next step of a watched loop: traced while it trains, and taped.

    Right before an optimizer would step on a loss or gradients that are not finite, the step is run again and
    investigated, while the script waits. What cannot be run again is told of by the trace.

    Args:
        watcher: of the loop; it is paused while the step is run again.
        captures: where the step goes before that.
        observer: told before the step is run again, once.
        may_wait: whether it may be run again.
        goes_on: it is over with the next step, not with the one under way.
        passes_over: the optimizers, by ``id``, whose turns are let go by for that of another one.
    """

    def __init__(
        self,
        watcher: Watch,
        captures: Captures,
        observer: Observer,
        *,
        may_wait: bool,
        goes_on: bool,
        passes_over: frozenset[int] = frozenset(),
    ) -> None:
        self.waited = 0.0
        """Seconds that the script has waited."""
        self.is_given_up = False
        """Whether torch was to make a graph of code in it: then nothing is known of the step."""
        self.is_wanted = False
        """Whether the step is to be captured, whatever it does."""
        self.goes_on = goes_on
        self.passes_over = passes_over
        self.taken = 0
        """The ``id`` of the optimizer whose turn fails, and was run again or captured; 0 before that."""
        self._may_wait = may_wait
        self._watcher = watcher
        self._captures = captures
        self._observer = observer
        self._model = watcher.models.together()
        parameters = list(self._model.parameters())
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._tape = Tape(self._model, self._device.type, self._give_up)
        self._made: Investigation | None = None
        self._spoilt: tuple[str, ...] = ()
        self._is_doubted = False
        """Whether it began with buffers that are lost, which a norm of the user's own may only write: where FP32 comes
        through it all the same, they have no part in it."""
        self._entered = ExitStack()

    def begin(self) -> None:
        """Traces from now on."""
        self._entered.callback(note_mode_left)
        self._trace = self._entered.enter_context(placed(self._model, StepTrace))
        self._entered.enter_context(taping(self._tape, self._about_to_step))

    def ask(self) -> None:
        """The step is to be captured, whatever it does."""
        self.is_wanted, self.passes_over = True, frozenset()

    def goes_over(self, *, is_bad: bool) -> bool:
        """Whether it goes on when a step has ended, rather than that this is the one."""
        return self.goes_on and not (is_bad or self.is_given_up or self.has_failed)

    def next_begins(self) -> None:
        """To be called when it goes on."""
        self.goes_on = False
        self._tape.step_begins()

    def end(self) -> None:
        """Leaves torch and the models as they were."""
        self._entered.close()

    @property
    def has_failed(self) -> bool:
        """Whether the trace has seen a part of the step only, and no replay has told more."""
        return bool(self._trace.failure) and self._made is None

    def _give_up(self) -> None:
        self.is_given_up = True
        self.end()

    def investigation(self, step: Step) -> Investigation:
        """What was found in the step, which has ended and was not healthy."""
        if self._made is not None:
            return replace(self._made, step=step.step, loss=step.loss)
        grew = self._watcher.optimizers.weights_grew
        made = replace(_as_it_trained(step, self._trace), weights_grew=grew, computed_inputs=self._spoilt)
        return replace(made, is_of_others=is_in_group() and not self._is_bad_itself())

    def _is_bad_itself(self) -> bool:
        """Whether what is not finite began in this process; without a trace of it, it may have."""
        is_of_loss = not math.isfinite(self._tape.loss) and self._trace.is_bad_itself("forward")
        return is_of_loss or self._trace.is_bad_itself("backward")

    def _has_lost_buffers(self) -> bool:
        """Whether the step began with buffers that an earlier one, whose loss was lost, has made inf or NaN."""
        lost = self._watcher.log.lost_buffers
        computed_with = {name for name, module in self._model.named_modules() if is_computed_with(module)}
        held = ((name, held) for name, held in self._tape.state.buffers.items() if name in lost)
        return any(name.rpartition(".")[0] in computed_with for name, _ in nonfinite(held))

    def _about_to_step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """The last moment with the weights of the step."""
        if self._watcher.is_paused or self._made is not None or not self._tape.is_of_this_thread:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = (("", parameter.grad) for parameter in parameters if parameter.grad is not None)
        is_its_turn = id(innermost(optimizer)) not in self.passes_over
        is_bad = is_its_turn and (not math.isfinite(self._tape.loss) or any(nonfinite(gradients)))
        # Where an earlier step has spoilt the weights, or what the model computes with, this one tells nothing.
        is_spoilt = is_bad and (are_weights_spoilt(self._model) or self._tape.has_nan_beside)
        self._is_doubted = is_bad and not is_spoilt and self._has_lost_buffers()
        # Where several train together, one whose own step is sound has got what is bad from another; and to run a step
        # again may be to wait for the others.
        is_alone = not is_in_group()
        may_be = is_bad and not is_spoilt
        has_room = may_be and self._captures.has_room
        is_captured = self.is_wanted or (has_room and not self._is_doubted and (is_alone or self._is_bad_itself()))
        is_free = is_alone and not hooks_half_weights(self._model)
        is_run = may_be and is_free and self._may_wait and _half_in(self._trace) is not None
        if is_captured or is_run:
            is_taken = self._take(scaler, is_bad=is_bad, is_captured=is_captured, is_run=is_run)
            self.taken = id(innermost(optimizer)) if is_taken and is_bad else self.taken
        self._tape.stepped_on()

    def _take(self, scaler: torch.amp.GradScaler | None, *, is_bad: bool, is_captured: bool, is_run: bool) -> bool:
        """Captures the step, and runs it again, where that can be done; the script waits meanwhile.

        Of one that was asked for, each sound turn of an optimizer takes the place of the one before, up to the first
        that fails: nobody knows which of them are to follow.
        """
        played, loss, number = self._tape.played(), self._tape.loss, self._watcher.log.closed()
        if played is None:
            self._cannot(number, is_bad=is_bad)
            return False
        computed = tuple(name for name, tensor in data_of(played) if self._trace.has_spoilt(tensor))  # as by a teacher
        if is_bad:
            self.end()
        began, scale = time.monotonic(), scaler._get_scale_async() if scaler is not None else None
        step = LoopStep(
            number,
            self._watcher,
            played,
            self._model,
            self._device,
            self._tape.state,
            _half_in(self._trace),
            1.0 if scale is None else float(scale),
            _why(loss) if is_bad else "end",
            computed,
        )
        capture = functools.partial(step.capture, self._captures, loss, scaler, is_wanted=self.is_wanted)
        if is_captured:
            with contextlib.nullcontext() if is_bad else _disable_current_modes():  # the rest is traced as well
                self._tape.alone(capture)
        if is_run:
            self._run_again(step)
        if self._is_doubted and not is_captured and self._made is not None and self._captures.has_room:
            self._tape.alone(capture)
        self.waited = time.monotonic() - began
        return True

    def _run_again(self, step: LoopStep) -> None:
        self._observer.replay(step.step, RUN_AGAIN)  # here, for behind this nothing is shown
        # Whatever it raises, such as that there is no memory for it, the script goes on.
        with held_signals(), contextlib.suppress(Exception):
            made = step.investigated(self._watcher.steps)
            self._made = made if made is not None and _is_told(made) else None
            if self._made is not None and self._is_doubted and not is_finite(self._made.fp32):
                self._made = None  # which what earlier steps have left in the buffers may be behind
            if self._made is not None and not is_finite(self._made.fp32):  # else it is meant, or no matter
                bad = step.blamed_data()
                self._watcher.log.batch += bad.batch
                if bad.spoilt:  # replays are given it too, and tell nothing: the trace has seen its op
                    self._made, self._spoilt = None, bad.spoilt
        torch.clear_autocast_cache()  # where the script steps within a region, it has casts of altered weights

    def _cannot(self, number: int, *, is_bad: bool) -> None:
        """Notes why the turn cannot be captured; the capture of an earlier one does not tell of one that fails."""
        if is_bad:
            self._captures.drop(number)
        if not self._captures.has(number):
            self._captures.cannot(number, f"it cannot be run again: {self._tape.why_not}")


def _is_told(made: Investigation) -> bool:
    """Whether it was seen again, and the script's own code raised nothing there."""
    return bool(made.reproduced) and not any(replay.error for replay in filter(None, (made.low, made.fp32)))


def _as_it_trained(step: Step, trace: StepTrace) -> Investigation:
    replay = Replay(
        dtype=_half_in(trace) or "float32",
        scale=step.scale,
        loss=step.loss,
        grad_norm=step.grad_norm if step.grad_norm is not None else 0.0,
        gradients=tuple(one.name for group in step.groups for one in group.parameters),
    )
    return Investigation(step.step, _why(step.loss), producers_in_place(replay, trace), loss=step.loss, reach="none")


def _why(loss: float) -> Why:
    """What calls for the investigation of a step that is not finite."""
    return "gradients" if math.isfinite(loss) else "loss"


def _half_in(trace: StepTrace) -> Half | None:
    """The half dtype that the ops of a step make; None where they make none."""
    dtypes = {seen.output.dtype for seen in trace.ops}
    return next((half for half in get_args(Half) if half in dtypes), None)
