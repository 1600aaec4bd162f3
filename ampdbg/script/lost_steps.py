"""Steps that no tape has: the first of a row whose loss is lost, one that the scaler withholds while its neighbours are
sound, and that in which a script exits or raises what FP32 would not."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from ampdbg.diagnosis.scale import is_nan_alone, new_lows
from ampdbg.errors import named_error
from ampdbg.observer import Observer
from ampdbg.probes.module_calls import recorded_graphs
from ampdbg.probes.tensors import are_weights_spoilt
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch
from ampdbg.quantities import listed
from ampdbg.record.run import EXITED, Investigation, Record
from ampdbg.replay.investigation import Why
from ampdbg.replay.open_pass import OpenPass
from ampdbg.replay.pass_buffers import is_computed_with
from ampdbg.replay.pass_end import given_gradients, losses_of
from ampdbg.replay.played_step import PlayedStep
from ampdbg.replay.step_data import data_of
from ampdbg.script.captures import Captures
from ampdbg.script.given_up_loss import GivenUpLoss
from ampdbg.script.launch import ScriptEnd
from ampdbg.script.loop_step import REPLACED, RUN_AGAIN, LoopStep
from ampdbg.script.lost_step import LostStep
from ampdbg.script.played_run import Half
from ampdbg.script.ranks import hooks_half_weights, is_in_group
from ampdbg.script.signals import held_signals
from ampdbg.script.traced_steps import LONGEST_GAP, TracedSteps

MOST_LOST = 2
"""So many steps of a run whose loss is lost are run again by their forward pass while it waits, as many whose gradients
alone are, and the one in which it ends."""

MODULES_ALONE = "step {}: only the modules were replayed; the loss shown is the sum of their outputs"
"""Where the script makes the loss of what they give by itself, or comes to none."""

LED_BACK = "of step {} the modules alone were run again, with the gradients that came to what they gave"
"""Where the script makes the loss by itself, and only its gradients are not finite."""

FAILS_BESIDE = (
    "step {} was not run again: the gradients that come to what its modules gave are not finite already: look at what "
    "the script makes of that"
)

ENOUGH = "as many as may be had been before it; ampdbg run --capture-step {} captures it"

RECORDED = "it runs a CUDA graph as that was recorded, and in no other precision"

BEGAN_SPOILT = "step {} was not run again: its buffer {} held inf or NaN before it, which an earlier step has written"

CAPTURE_BEFORE = "; ampdbg run --capture-step {} has the one before it run again"

NOT_CAUGHT = "step {}, whose loss is not finite, is the last of the script and was not captured: {}"
"""With what to do about it."""

NOT_AGAIN = "step {}, whose loss is not finite, was not run again: {}"
"""With why; shown where no other step tells more."""

KNOWN_LATE = "that was known only when its weights had been changed"
"""As on a GPU of a fused optimizer, whose scaler does not wait for its numbers."""


class LostSteps:
    """Steps whose forward pass fails before any tape runs: the first of a row, and the one in which a script ends.

    Args:
        watcher: of the loop.
        captures: where the step goes in which the script ends.
        traced: gets what is found; a step that it traces is run again by it.
        observer: told before a step is run again.
        investigates: they may be run again.
    """

    def __init__(
        self, watcher: Watch, captures: Captures, traced: TracedSteps, observer: Observer, *, investigates: bool
    ) -> None:
        watcher.lost = self._lost
        watcher.withheld = self._withheld
        self.open_pass = OpenPass(watcher, self._next_begins)
        """Notes the step, and is to be entered while the script runs."""
        watcher.models.called = lambda: self.open_pass.called
        watcher.log.poisoned = lambda: {name for name, _ in self._poisoned()}
        self._watcher = watcher
        self._captures = captures
        self._observer = observer
        self._investigates = investigates
        self._owner = os.getpid()
        self._traced = traced
        self._tries: dict[Why, int] = {"loss": 0, "gradients": 0}
        self._latest = -LONGEST_GAP
        self._why = ""
        self._why_not = ""
        self._untold: list[str] = []
        self._not_again: dict[int, str] = {}
        """Why lost steps could not be run again."""
        self._given_up: GivenUpLoss | None = None

    def _next_begins(self) -> None:
        """Called when another pass begins: the loop itself may have given up one whose loss is not finite."""
        step, has_gone = self._watcher.open_step, self.open_pass.has_gone_backward
        loss = None if has_gone else self.open_pass.lost_loss
        if has_gone:
            step.read_losses_aside()
        is_known = loss is not None and self._given_up is not None and self._given_up.is_of(loss)
        if is_known or (loss is None and not (has_gone and not step.is_known_finite())):
            return
        self._count_given_up()
        self._watcher.learn()
        self._watcher.optimizers.adopt(self.open_pass.trained)
        self._lost(is_last_chance=not has_gone or step.scaler is None, is_given_up=not has_gone)
        if loss is not None:
            self._given_up = GivenUpLoss(loss, partial(self._watcher.guard.hooked, self._count_given_up))

    def _count_given_up(self) -> None:
        """Ends the step that the loop has given up, if it has."""
        given_up, self._given_up = self._given_up, None
        if given_up is not None and not given_up.ended_in_a_backward_pass():
            self._watcher.log.break_off(given_up.loss, is_skipped=True)

    def _withheld(self) -> None:
        """Called when the gradients of a step are not finite, though its loss is.

        One such step may be chance. Another that neither a start nor a scale just grown explains, behind a sound one,
        may be a fault of its batch, which no tape of the next step would show; one that leaves NaN alone, at any time,
        be it the first of all.
        """
        open_step, steps = self._watcher.open_step, self._watcher.steps
        is_unlike_a_scale = is_nan_alone(open_step.groups)
        if not steps:
            stands_alone = is_unlike_a_scale
        else:
            stands_alone = not steps[-1].skipped and bool(open_step.loss_scale() <= steps[-1].scale)
        if stands_alone and (is_unlike_a_scale or new_lows(steps, self._watcher.log.closed())):
            self._lost(is_last_chance=True, scaler=open_step.scaler)

    def _lost(
        self, is_last_chance: bool, *, is_given_up: bool = False, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        """Called when the loss of a step is not finite, while its weights are still its own; the script waits.

        ``is_last_chance`` says that no optimizer will show it, or that one is about to make NaN of the weights, and
        ``is_given_up`` that its pass is the one under way: else that has gone backward, or is not the step's. Where
        the loss is finite, and only its gradients are not, ``scaler`` is the one that has found it.
        """
        step = self._watcher.log.closed()
        is_first, self._latest = step - self._latest > 1, step
        why: Why = "loss" if scaler is None else "gradients"
        if not is_first or self._traced.is_tracing:
            return
        has_tries = self._tries[why] < MOST_LOST
        self._why_not = self._why_not_noted(is_given_up) if has_tries else ENOUGH.format(step)
        if not self._why_not:
            self._tries[why] += 1
            with held_signals():
                try:
                    self._try(step, is_last_chance, scaler)
                except Exception as error:  # noqa: BLE001 - as that there is no memory for it: the script goes on
                    self._why_not = named_error(error)
            torch.clear_autocast_cache()  # where the script steps within a region, it has casts of altered weights
        if self._why_not and scaler is None and self._investigates:
            self._not_again[step] = self._why_not

    def _why_not_noted(self, is_given_up: bool) -> str:
        """Why the pass of the step that is lost is not the one that was noted; "" where it is."""
        if self._watcher.has_other_loops:
            return "other threads train too"
        if not self.open_pass.called:
            return "no call of its modules was seen"
        is_noted = is_given_up or self.open_pass.has_gone_backward
        return "" if is_noted else "more than one backward pass has followed its calls"

    def _try(self, step: int, is_last_chance: bool, scaler: torch.amp.GradScaler | None) -> None:
        """Runs the step again, and keeps what that shows."""
        why: Why = "loss" if scaler is None else "gradients"
        again, made = self._run_again(lambda: self._observer.replay(step, RUN_AGAIN), is_lost=True, why=why)
        # There is no asking for step 0.
        whole = f"; ampdbg run --capture-step {step} has all of it run again" if step else ""
        if again is None:
            # What overflows there may do so because of the loss scale alone.
            is_told = self._why_not == FAILS_BESIDE and is_nan_alone(self._watcher.open_step.groups)
            self._untold += [FAILS_BESIDE.format(step) + whole] * is_told
            return
        too = ""
        if made is not None:
            lost = LostStep.of(again, made, self._watcher.steps)
            again, made, too = lost.again, lost.made, lost.why_untold()
            self._watcher.log.batch += lost.bad.batch
            self._traced.found += [made] * (not too)
        if too:
            self._untold.append(f"step {step} was run again: {too}{whole}")
        elif given_gradients(again.played) is not None:
            self._untold.append(LED_BACK.format(step) + whole)
        else:
            # The next one is taped, and captured whole where it fails too.
            goes_on = not is_last_chance and not any(is_computed_with(owner) for _, owner in self._poisoned())
            if self._captures.are_wanted or not goes_on:
                self._capture(again, made, scaler, stands_in=goes_on)

    def _poisoned(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.open_pass.buffers.poisoned(self._watcher.models.named_modules())

    def ended(self, ending: ScriptEnd) -> None:
        """To be called when the script has ended, while what it holds is still alive."""
        self._count_given_up()
        if ending.error is not None:
            self._watcher.calls.failed(ending.error)
        is_left = os.getpid() != self._owner or isinstance(ending.error, KeyboardInterrupt)
        if is_left or self._watcher.failure or is_told(self._watcher, ending.error):
            return
        # Whatever it raises, and if the user does not want to wait for it, the script ends as it does.
        with contextlib.suppress(Exception, KeyboardInterrupt):
            if not self.open_pass.is_under_way:
                self._ended_between_steps(ending)
                return
            if ending.code == 0:
                self._next_begins()  # it may have given up its last pass, as others before
                self._count_given_up()
                return
            self._watcher.learn()
            how = f"the script raised {type(ending.error).__name__}" if ending.error else f"{EXITED} {ending.code}"
            step = self._watcher.log.closed()
            self._why = f"{how} in step {step}, after a forward pass from which nothing went backward"
            self._look(step)
        self.open_pass.forget()

    def _ended_between_steps(self, ending: ScriptEnd) -> None:
        """Says so where the last step was lost and not captured; it may be why the script has ended."""
        last = self._watcher.log.closed() - 1
        if ending.code == 0 or last < 0 or math.isfinite(self._watcher.log.latest().loss) or self._captures.has(last):
            return
        # There is no asking for step 0.
        what = f"ampdbg run --capture-step {last} does that" if last else "where the script goes on, a later one is"
        self._untold.append(NOT_CAUGHT.format(last, what))

    def seen(self, record: Record) -> Record:
        """A record of the loop with why nothing was found in the step in which the script ended, and what was run again
        of others."""
        parts = [made.step for made in record.investigations if made.reach == "modules" and made.why != "gradients"]
        found = [made for made in record.investigations if made.replaced]
        replaced = (REPLACED.format(made.step, listed(made.replaced)) for made in found)
        told_of = (*map(MODULES_ALONE.format, parts), *replaced, *self._untold, *self._why_others_were_not(record))
        notes = (*record.unseen.notes, *told_of)
        error = "\n".join(filter(None, (record.error, self._why)))
        return replace(record, error=error, unseen=replace(record.unseen, notes=notes))

    def _why_others_were_not(self, record: Record) -> Iterator[str]:
        """Of lost steps that neither their own replays nor those of a step soon after tell of; and of the first that
        has been taken though its loss was lost, where that has come out afterwards alone."""
        told = {made.step for made in record.investigations}
        for step, why in itertools.islice(self._not_again.items(), MOST_LOST + 1):
            if told.isdisjoint(range(step, step + LONGEST_GAP + 1)):
                yield NOT_AGAIN.format(step, why)
        if self._latest < 0 and self._investigates and not told:
            taken = record.steps[: -1 if record.error else None]  # the last is the one in which the script has ended
            late = (step.step for step in taken if not step.skipped and not math.isfinite(step.loss))
            yield from (NOT_AGAIN.format(step, KNOWN_LATE) for step in itertools.islice(late, 1))

    def _look(self, step: int) -> None:
        """Runs the step again in which the script has ended, and captures it."""
        again, made = self._run_again(lambda: self._observer.ended_in(step))
        if again is None:
            self._why += f"; {self._why_not}" * bool(self._why_not)
            return
        if made is None:
            self._capture(again, made)
            return
        lost = LostStep.of(again, made, self._watcher.steps)
        again, made, too = lost.again, lost.made, lost.why_untold()
        self._watcher.log.batch += lost.bad.batch
        if too and not lost.bad.batch:
            self._why += f". Run again, {too}"
            return
        self._why = ""
        self._capture(again, made)
        self._traced.found += [made] * (not too)
        self._watcher.log.break_off(made.low.loss)

    def _capture(
        self,
        again: LoopStep,
        made: Investigation | None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        stands_in: bool = False,
    ) -> None:
        loss = math.nan if made is None else made.low.loss
        again.capture(self._captures, loss, scaler, is_broken_off=scaler is None, stands_in=stands_in)

    def _run_again(
        self, tell: Callable[[], None], *, is_lost: bool = False, why: Why = "loss"
    ) -> tuple[LoopStep | None, Investigation | None]:
        """The pass as it can be run again, and what replays of it show; ``tell`` is called before.

        Where nothing is half, that is so only if it ``is_lost``: an error may have any cause. Weights that cannot be
        run in FP32 while the script goes on are left to ``ampdbg replay``.
        """
        watcher, self._why_not = self._watcher, ""
        model = watcher.models.together()
        device = next((parameter.device for parameter in model.parameters()), None)
        half = None if device is None else self._half(model, device)
        if device is None or not self._investigates:
            return None, None
        if half is None and not (is_lost and watcher.is_in_fp32):
            return self._cannot("it is not known what it lowers to" * is_lost)
        if are_weights_spoilt(model):
            return self._cannot("its weights were NaN or inf before it" * is_lost)
        spoilt = next(self.open_pass.buffers.were_spoilt(model.named_modules()), "")
        if spoilt:
            step = watcher.log.closed()
            self._untold.append(BEGAN_SPOILT.format(step, spoilt) + CAPTURE_BEFORE.format(step - 1) * (step > 1))
            return self._cannot("")
        if is_in_group():
            return self._cannot("a step of a group is not run again")
        (played, scale), state = self._played(model, device, why), self.open_pass.buffers.state(model)
        if played is None or state is None:
            return self._cannot(self._why_not or "its calls cannot be made again")
        computed = tuple(name for name, _ in data_of(played)) if self.open_pass.has_helpers else ()
        again = LoopStep(watcher.log.closed(), watcher, played, model, device, state, half, scale, why, computed)
        if hooks_half_weights(model):
            return again, None
        tell()  # here, for behind this nothing is shown
        has_loss = losses_of(played) == 1  # a sum of other numbers is not to be compared with losses
        made = again.investigated(watcher.steps if has_loss else ())
        return again, made and replace(made, reach="whole" if has_loss else "modules")

    def _played(self, model: torch.nn.Module, device: torch.device, why: Why) -> tuple[PlayedStep | None, float]:
        """The pass as it was noted, and its loss scale. Where its gradients are ``why``, and its modules do not make
        the loss, those lead back that came to what they gave."""
        if recorded_graphs(model):
            self._why_not = RECORDED
            return None, 1.0
        played = self.open_pass.played(model, device.type)
        if why == "loss" or played is None or losses_of(played) == 1:
            return played, self._watcher.steps[-1].scale if self._watcher.steps else 1.0
        scale = float(self._watcher.open_step.loss_scale())
        played = self.open_pass.played(model, device.type, scale=scale)
        gradients = None if played is None else given_gradients(played)
        if gradients is not None and not any(one is not None for one in gradients.gradients):
            self._why_not = FAILS_BESIDE
            return None, scale
        return played, scale

    def _cannot(self, why: str) -> tuple[None, None]:
        self._why_not = why
        return None, None

    def _half(self, model: torch.nn.Module, device: torch.device) -> Half | None:
        """What autocast lowers to around it, what the weights are, or what the graphs of earlier losses held."""
        dtypes = [self.open_pass.lowers_to(device.type), *{parameter.dtype for parameter in model.parameters()}]
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None]
        names += sorted(self._watcher.calls.lowered)
        return next((half for name in names for half in get_args(Half) if half == name), None)


def is_told(watcher: Watch, error: BaseException | None) -> bool:
    """Whether an error that the script has raised tells by itself what is wrong."""
    by_autocast = autocast_error(error, watcher.log.closed(), watcher.models.named_modules)
    return by_autocast is not None or watcher.calls.explains(error)
