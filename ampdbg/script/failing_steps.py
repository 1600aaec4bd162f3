"""Failing steps of the user's loop: choose which to replay and capture while the model still has their weights.

The first of several consecutive steps with a non-finite loss is investigated. If only the gradients are not finite,
the loss scale may still be settling. Such a step is investigated if no scaler withholds it, or only fractions are left
below its scale. It is also investigated if it has NaN but no inf, or if an earlier step survived its scale. So are the
``SKIPS_IN_A_ROW``-th in a row, and the step in which the script ends. Replays take ``REPLAY_SHARE`` of the run's time.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch.optim import Optimizer

from ampdbg.agreement import STEPS_BEFORE_COMPARISON, is_comparable, is_finite
from ampdbg.diagnosis.cause import SKIPS_IN_A_ROW
from ampdbg.diagnosis.hidden_faults import HiddenFault
from ampdbg.diagnosis.producers import survivor
from ampdbg.diagnosis.scale import is_nan_alone
from ampdbg.errors import named_error
from ampdbg.formats import FLOAT16
from ampdbg.observer import Observer
from ampdbg.probes.dtype_contract import cast_policies
from ampdbg.probes.module_calls import recorded_graphs, run_eagerly
from ampdbg.probes.seams import is_in_backward
from ampdbg.probes.tensors import are_weights_spoilt, nonfinite
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch
from ampdbg.quantities import counted, number
from ampdbg.record.log import kept
from ampdbg.record.run import EXITED, Investigation, Record, ScriptRun
from ampdbg.replay.investigation import StepFacts, Why, is_blamed
from ampdbg.replay.recorder import Recorder
from ampdbg.replay.step import Half, NotReplayableError, RecordedStep
from ampdbg.script.capture import Captures
from ampdbg.script.launch import ScriptEnd
from ampdbg.script.live_step import LiveStep
from ampdbg.script.ranks import hooks_half_weights, is_in_group, with_rank
from ampdbg.script.signals import held_signals

REPLAY_SHARE, REPLAY_SECONDS = 0.1, 5.0
"""While a loss scale may be settling, replays take at most this share of the run's time and ``REPLAY_SECONDS``."""

COMPARISON = 30.0
"""Replays of one healthy step of each optimizer may take this many seconds, however short the run is."""

REPLAYS = 20
"""The approximate duration of a step's replays, as a multiple of the step's duration."""

MOST_OF_A_KIND = 3
"""At most this many steps with a lost loss are replayed, and as many with only non-finite gradients. For as many with a
settling loss scale, replays may exceed their share of the run's time."""

REPLAY_ANNOUNCEMENT = "FP16, FP32 and more"
"""The announcement to the observer before a step is replayed."""

MODULES_ALONE = "step {}: only its modules were replayed ({}); the sum of their outputs replaces its loss"

NOT_REPLAYED = "step {}, whose {} not finite, could not be replayed: {}"

NOT_COMPARED = "step {} was not compared with FP32: {}"

ENDED_EARLIER = "the script ended before its loss"

NOT_IN_FP32 = "its modules give inf or NaN in FP32 too, which it may want, and the script ended before its loss"
"""Masks, and the values that they hide, may be inf or NaN by design. Without a loss, nothing shows an error."""

NOT_REACHED = "step {} was not captured: the script made only {}, counted from 0"
"""The note on a requested step that the script never reached."""

PUT_OFF = "ampdbg did not replay {} for lack of time: replays take at most a tenth of the run's"

HOOKED = "a wrapper such as DDP hooks its half weights, and a replay in FP32 would remove the hooks"

SHARDED = (
    "FSDP gathers its weights or casts them, and a replay could leave them so; without FSDP, under torch.autocast, "
    "ampdbg replays it"
)

WITHIN_A_PASS = "its optimizer steps within the backward pass, which a replay would disturb"


class Policy:
    """Decides which failing steps are investigated."""

    def __init__(self) -> None:
        self._tries = dict[Why, int]()
        self._looking_at: Why = "end"
        self._taken, self._compared, self._missed = Counter[int](), set[int](), Counter[int]()
        self._in_a_row, self._settling = dict[int, int](), 0
        self._lost_rows, self._seen_in_row = set[int](), set[tuple[int, str]]()
        self._began, self._steps, self.waited = time.monotonic(), -1, 0.0
        self.put_off = 0
        """The number of due steps that were not replayed, because replays take so long."""

    def wants(self, why: Why, optimizer: int, *, has_survived: bool, is_nan: bool, may_settle: bool) -> bool:
        """True if a failing step of an optimizer should be investigated.

        ``has_survived``: an earlier step survived at least this loss scale. ``is_nan``: the gradients have no inf.
        ``may_settle``: a scaler withholds the step and can lower the scale without reaching fractions."""
        if why == "loss":
            is_first = optimizer not in self._lost_rows
            self._lost_rows.add(optimizer)
            return is_first and self.is_open(why)
        self._lost_rows.discard(optimizer)
        skips = self._in_a_row[optimizer] = self._in_a_row.get(optimizer, 0) + 1
        self._taken[optimizer] = 0
        kinds = {(optimizer, "NaN"): is_nan, (optimizer, "at the lowest scale"): not may_settle}
        new = {kind for kind, holds in kinds.items() if holds} - self._seen_in_row
        self._seen_in_row |= new
        is_informative = (optimizer, "NaN") in new or skips == SKIPS_IN_A_ROW
        is_owed = (optimizer, "at the lowest scale") in new or (is_informative and self._settling < MOST_OF_A_KIND)
        is_due = (is_owed or is_informative or (skips == 1 and has_survived)) and self.is_open(why)
        is_put_off = is_due and not (is_owed or self._is_in_time())
        self.put_off += is_put_off
        return is_due and not is_put_off

    def compares(self, optimizer: int) -> bool:
        """True if a healthy-looking step should be compared with FP32. One step per optimizer is, after several updates
        in a row, unless a lost loss was investigated."""
        is_due = (
            self._taken[optimizer] >= STEPS_BEFORE_COMPARISON
            and optimizer not in self._compared
            and not self._tries.get("loss")
        )
        return is_due and self.is_open("end")

    @property
    def has_time(self) -> bool:
        """True if a due step may be replayed. Short replays ignore the time used so far, so equal runs decide alike."""
        return self._expected <= COMPARISON or self._is_in_time()

    def compared(self, optimizer: int) -> None:
        """Compare no further step of this optimizer with FP32."""
        self._compared.add(optimizer)

    def still_compares(self, optimizer: int) -> None:
        """Allow the comparison of a later step, because this step failed or could not be compared. The attempt does not
        count against the limit."""
        self._missed[optimizer] += 1
        self._tries["end"] -= 1
        if self._missed[optimizer] < MOST_OF_A_KIND:
            self._compared.discard(optimizer)

    @property
    def _expected(self) -> float:
        """The approximate duration of a step's replays, in seconds."""
        return REPLAYS * (time.monotonic() - self._began - self.waited) / max(1, self._steps)

    def _is_in_time(self) -> bool:
        return self.waited + self._expected <= REPLAY_SECONDS + REPLAY_SHARE * (time.monotonic() - self._began)

    def ended(self) -> None:
        """Record the end of a step. The first step is not timed, because its duration is not typical."""
        self._steps += 1
        self._began = self._began if self._steps else time.monotonic()

    def taken(self, optimizer: int) -> None:
        """Record that an optimizer has stepped with finite gradients."""
        self._taken[optimizer] += 1
        self.row_ended(optimizer)
        self._lost_rows.discard(optimizer)

    def row_ended(self, optimizer: int) -> None:
        """End an optimizer's row of failing steps, because the loss scale is not their cause. The next step with
        non-finite gradients starts a new row."""
        self._in_a_row[optimizer] = 0
        self._seen_in_row = {kind for kind in self._seen_in_row if kind[0] != optimizer}

    def settled(self) -> None:
        """Do not count the current investigation against the limit: the loss scale was only settling."""
        self._tries[self._looking_at] -= 1
        self._settling += 1

    def is_open(self, why: Why) -> bool:
        """True if more steps may be investigated for this reason."""
        return self._tries.get(why, 0) < MOST_OF_A_KIND

    @contextlib.contextmanager
    def looking(self, why: Why) -> Iterator[None]:
        """Count and time an investigation."""
        began, self._looking_at = time.monotonic(), why
        self._tries[why] = self._tries.get(why, 0) + 1
        try:
            yield
        finally:
            self.waited += time.monotonic() - began


class FailingSteps:
    """Investigates the failing steps of a watched loop right before their weights change, and captures them.

    Args:
        watcher: the watch of the loop.
        captures: writes the captures.
        observer: notified before a step is replayed.
        investigates: allow replays.
    """

    def __init__(self, watcher: Watch, captures: Captures, observer: Observer, *, investigates: bool = True) -> None:
        self.found: list[Investigation] = []
        self.captures = captures
        self.recorder = Recorder(
            lambda: watcher.is_paused,
            self._on_pass_without_step,
            self._about_to_step,
            is_inside_a_step=lambda: watcher.is_inside_a_step,
        )
        """Records the steps. Enter it as a context manager while the loop runs."""
        watcher.lost = partial(self._fails, "loss")
        watcher.withheld = partial(self._fails, "gradients")
        watcher.gave_up = self._on_given_up_pass
        watcher.ended = self.step_ended
        watcher.went_backward = self.recorder.went_backward
        self.recorder.ends_in_weights = watcher.ends_in_weights
        watcher.log.poisoned = lambda: set(self.recorder.before.poisoned(watcher.models.named_buffers()))
        watcher.models.called = lambda: self.recorder.called
        watcher.contract.autocast_dtype = self.recorder.autocast_dtype
        self._watcher, self._observer, self._investigates = watcher, observer, investigates
        self._policy = Policy()
        self._notes: list[str] = []
        self._not_compared: dict[int, str] = {}
        """Maps each optimizer to the reason why its latest due comparison with FP32 showed nothing, or ""."""
        self.why_ended = ""
        """How the script ended within a step, if replays do not show why."""
        self._looked_at, self._stepping = -1, set[int]()
        self._owner = os.getpid()

    # When a step fails.

    def _on_pass_without_step(self) -> None:
        """Handle a module call before any optimizer has stepped. The loop may have discarded a loss. A loop with its
        own loss scale may have discarded that loss's gradients."""
        if self._watcher.has_unseen_steps:
            return
        if self.recorder.is_under_way:
            self._on_loss_without_backward()
            return
        step = self._watcher.open_step
        step.read_losses_aside()
        withholding = self._watcher.withholding if step.scaler is None else None
        if step.scaler is None and not step.is_known_finite():
            self._fails("loss", None)
        elif withholding is not None:
            self._fails("gradients", withholding, may_settle=self._own_scale > 1.0)

    def _on_loss_without_backward(self) -> None:
        """Handle a module call after a loss that had no backward pass, if the loss is lost."""
        loss = self.recorder.lost_loss
        if loss is None or self.recorder.awaits_decision(loss):
            return
        self.recorder.give_up_loss()
        self._watcher.learn()
        self._fails("loss", None, loss)
        value, log, is_skipped = float(loss.detach()), self._watcher.log, not self.recorder.has_gradients_of(loss)
        self.recorder.watch_given_up_loss(loss, lambda: log.end_without_backward(value, is_skipped=is_skipped))

    def _on_given_up_pass(self) -> None:
        """Handle a lost loss that the loop has discarded: its gradients are cleared and a later pass has run."""
        with self.recorder.without_the_last_pass():
            self._fails("loss", None)

    def _fails(
        self, why: Why, optimizer: Optimizer | None, loss: torch.Tensor | None = None, *, may_settle: bool = False
    ) -> None:
        """Handle a step with a non-finite loss, or only non-finite gradients, before its weights change.
        ``may_settle``: the script itself withholds the step and may lower its own loss scale."""
        place = 0 if optimizer is None else self._watcher.optimizers.number_of(optimizer)
        number, scale = self._watcher.log.closed(), self._scale(place) * self._own_scale
        is_nan = is_nan_alone(self._watcher.open_step.groups)
        largest_survived = max(
            (step.scale for step in self._watcher.steps if not step.skipped and step.optimizer == place), default=-1.0
        )
        may_settle |= self._watcher.open_step.scaler is not None and scale > 1.0
        is_due = self._policy.wants(
            why, place, has_survived=scale <= largest_survived, is_nan=is_nan, may_settle=may_settle
        )
        if number == self._looked_at or not (is_due or self.captures.is_wanted):
            return
        self._looked_at = number
        if optimizer is not None:
            self.recorder.withheld(optimizer)
        made = self._investigate_live(number, why, loss)
        if made is not None and made.reproduced and not is_finite(made.fp32):
            self._policy.row_ended(place)

    def _investigate_live(self, number: int, why: Why, loss: torch.Tensor | None = None) -> Investigation | None:
        """Investigate a step while the script waits. If that shows nothing, add a note with the reason."""
        if self._investigates:
            self._observer.replay(number, REPLAY_ANNOUNCEMENT)
        made, why_not = self._tried(why, lambda: self._investigated(self._live(number, why, loss)))
        if why_not and self._investigates:
            self._notes.append(NOT_REPLAYED.format(number, "loss is" if why == "loss" else "gradients are", why_not))
        return made

    def _scale(self, place: int) -> float:
        if self._watcher.open_step.scaler is not None:
            return float(self._watcher.open_step.loss_scale())
        scaled = (step.scale for step in reversed(self._watcher.steps) if step.optimizer == place and step.scaler)
        return next(scaled, 1.0)

    @property
    def _own_scale(self) -> float:
        """The script's own factor on the open step's losses if that is known to be a loss scale, otherwise 1."""
        factor = self._watcher.open_step.factor
        return factor if self._watcher.log.is_own_scale(factor) else 1.0

    def _tried(self, why: Why, replay: Callable[[], Investigation]) -> tuple[Investigation | None, str]:
        """Replay a step while the script waits. Return the investigation, or None and the reason, or "" for no note."""
        with held_signals(), run_eagerly(), self._policy.looking(why):
            try:
                return replay(), ""
            except NotReplayableError as reason:
                return None, str(reason)
            except Exception as error:  # noqa: BLE001 - such as out of memory: the script continues
                return None, named_error(error)

    def _investigated(self, live: LiveStep) -> Investigation:
        """Capture and replay a step.

        Raises:
            NotReplayableError: no replay is allowed, or the replays show nothing.
        """
        why_not = HOOKED * hooks_half_weights(live.recorded.model)
        is_free = self._investigates and not why_not
        if self.captures.are_wanted and (live.recorded.reach == "whole" or is_free):
            self._capture(live)
        if not is_free:
            raise NotReplayableError(why_not)
        made = live.investigated()
        made = replace(made, is_of_others=is_in_group() and not made.reproduced)
        if settles(made):
            self._policy.settled()
        raises = bool(made.low.error and made.reference.error)  # FP32 then shows no more
        has_no_loss = live.why_no_further == ENDED_EARLIER
        is_lost_anyway = raises or (has_no_loss and not is_finite(made.fp32))
        is_alike = is_lost_anyway and not self._watcher.log.batch
        if made.is_of_others or ((settles(made) or is_alike) and not self.captures.is_wanted):
            self.captures.drop(live.facts.step)
        if not (made.reproduced or made.is_of_others):
            raise NotReplayableError(_why_finite(live))
        if made.reproduced and (is_alike or made.low.error) and not is_blamed(made):
            raise NotReplayableError(made.low.error or NOT_IN_FP32)
        self.found[:] = kept([*self.found, made])
        return made

    def _capture(self, live: LiveStep) -> None:
        with self._watcher.paused(), held_signals(), run_eagerly(), torch.no_grad():
            self.captures.add(live)

    def _live(self, number: int, why: Why, loss: torch.Tensor | None = None, *, is_cut: bool = False) -> LiveStep:
        """Return the step in replayable form. ``is_cut``: the script ended within it.

        Raises:
            NotReplayableError: it cannot be replayed.
        """
        watcher, before = self._watcher, self.recorder.before
        watcher.optimizers.adopt(self.recorder.trained)
        model = watcher.models.as_one_module()
        why_not = self._why_not_now(model, why)
        if why_not:
            raise NotReplayableError(why_not)
        half = self._half(model)
        of = next((one.optimizer for one in watcher.steps if one.step == number), watcher.open_step.optimizer or 0)
        scale, of_loop = self._scale(of), (model, tuple(watcher.optimizers))
        whole = partial(self.recorder.step, *of_loop, loss, watcher.stepping, scale, self._own_scale)
        modules = partial(self.recorder.modules, *of_loop)
        step, why_no_further = _recorded(whole, modules, why, is_cut=is_cut)
        if half is None and not watcher.is_in_fp32:
            raise NotReplayableError("the dtype of autocast is not known")
        spoilt = next((name for name, _ in nonfinite(before.changing(step.state))), "")
        if spoilt and why != "end":
            raise NotReplayableError(
                f"its buffer {spoilt} held inf or NaN before it, from an earlier step; ampdbg run --capture-step "
                f"{number - 1} replays the step before it"
            )
        if why == "loss" and step.scales_gradients:
            why = "gradients"  # the script's own loss scale may make the loss non-finite
        losses, scaler = watcher.open_step.backward_losses, watcher.open_step.scaler
        sizes = before.rewritten(step.state, step.calls)
        rewritten = {name: size for name, size in sizes.items() if not size < FLOAT16.overflow_threshold}
        facts = StepFacts(
            step=number,
            scale=scale * step.own_scale,
            loss=sum(map(float, losses)) / step.own_scale if losses else math.nan,
            why=why,
            half=half,
            reach=step.reach,
            weights_grew=watcher.optimizers.weights_grew,
            scaler_number=0 if scaler is None else watcher.calls.number_of(scaler),
            optimizer=of,
        )
        return LiveStep(facts, watcher, step, why_no_further, rewritten)

    def _why_not_now(self, model: torch.nn.Module, why: Why) -> str:
        """Return why the current step cannot be replayed, or "" if it can.

        FSDP is ready for a forward pass only after a backward pass, which a replay may lack.
        """
        policies = cast_policies(self._watcher.models.roots).values()
        reasons = (
            ("other threads train too", self._watcher.has_other_loops),
            ("its model is not known", next(model.parameters(), None) is None),
            ("NaN or inf already went into its weights", are_weights_spoilt(model)),
            ("it runs a recorded CUDA graph, which runs in no other precision", bool(recorded_graphs(model))),
            (WITHIN_A_PASS, is_in_backward()),
            (SHARDED, any(one.param_dtype or (one.name and why != "end") for one in policies)),
        )
        return next((reason for reason, holds in reasons if holds), "")

    def _half(self, model: torch.nn.Module) -> Half | None:
        """Return the half dtype that autocast uses, that the weights have, or that earlier losses' graphs held. Else it
        is that of autocast inside a module."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        dtypes = [self.recorder.autocast_dtype(device.type), *{parameter.dtype for parameter in model.parameters()}]
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None]
        names += sorted(self._watcher.calls.lowered)
        names += sorted(str(dtype).removeprefix("torch.") for dtype in self.recorder.entered_dtypes)
        return next((half for name in names for half in get_args(Half) if half == name), None)

    # Requested captures.

    def _about_to_step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Before an optimizer steps, capture a requested step, or compare a healthy step with FP32."""
        watcher = self._watcher
        place = watcher.optimizers.number_of(optimizer) if optimizer in watcher.optimizers else None
        if place is not None:
            watcher.begin_step_of(optimizer)
            self._stepping.add(place)
        number = watcher.log.closed()
        if number == self._looked_at:
            return
        if self.captures.is_wanted:
            self._capture_at_once(number)
        elif place is not None and self._may_be_compared(place, number):
            self._compare(place, number)

    def _capture_at_once(self, number: int) -> None:
        is_lost = not self._watcher.open_step.is_known_finite()
        try:
            self._capture(self._live(number, "loss" if is_lost else "end"))
        except NotReplayableError as reason:
            self.captures.cannot(number, f"it cannot be replayed: {reason}")

    # One healthy step, compared with FP32.

    def _may_be_compared(self, place: int, number: int) -> bool:
        if any(made.step == number for made in self.found):  # investigated for another optimizer of the same losses
            self._policy.compared(place)
        if not (self._policy.compares(place) and self._watcher.open_step.is_known_finite()):
            return False
        reasons = (
            ("--no-investigate allows no replay", not self._investigates),
            ("its process trains together with others, which a replay would block", is_in_group()),
            (WITHIN_A_PASS, is_in_backward()),
            ("its replays take more of the run's time than ampdbg uses", not self._policy.has_time),
        )
        why_not = next((why for why, holds in reasons if holds), "")
        if why_not:
            self._not_compared.setdefault(place, NOT_COMPARED.format(number, why_not))
        return not why_not

    def _compare(self, place: int, number: int) -> None:
        """Compare a step that looks healthy with FP32, and capture it if it hides a fault."""
        self._policy.compared(place)
        _, why_not = self._tried("end", lambda: self._compared(place, number))
        self._not_compared[place] = NOT_COMPARED.format(number, why_not) if why_not else ""

    def _compared(self, place: int, step: int) -> Investigation:
        """Compare a step with FP32.

        Raises:
            NotReplayableError: the comparison shows nothing.
        """
        try:
            live = self._live(step, "end")
        except NotReplayableError:  # for example, a tensor was changed in place; it will be copied from now on
            self._policy.still_compares(place)
            raise
        if hooks_half_weights(live.recorded.model):
            raise NotReplayableError(HOOKED)
        made = live.investigated()
        if not is_finite(made.low):  # a failing step, which is investigated as such
            self._policy.still_compares(live.facts.optimizer)
            raise NotReplayableError("its replay in half gives inf or NaN")
        if not is_comparable(made):
            raise NotReplayableError(_why_not_judged(made))
        record = self._watcher.record()
        fault = HiddenFault(made, replace(record, steps=live.facts.before(record.steps)))
        if fault.has_grown_or_risen:
            raise NotReplayableError("its weights or its losses have grown too far since the start")
        if not made.reference.grad_norm:
            raise NotReplayableError("in FP32 the gradients of its modules' weights are all zero or missing")
        if fault.is_fault and self.captures.are_wanted:
            self._capture(live)
        self.found[:] = kept([*self.found, made])
        return made

    def step_ended(self, is_bad: bool) -> None:
        closed, captures = self._watcher.log.closed(), self.captures
        self._policy.ended()
        if is_bad or closed == 1:
            captures.start = with_rank(captures.start)
        for optimizer in () if is_bad else self._stepping:
            self._policy.taken(optimizer)
        self._stepping.clear()
        captures.begins(closed)

    # The end of the script.

    def ended(self, ending: ScriptEnd) -> None:
        """Handle the end of the script while its objects are still alive."""
        if ending.error is not None:
            self._watcher.calls.failed(ending.error)
        is_left = os.getpid() != self._owner or isinstance(ending.error, KeyboardInterrupt)
        if (
            is_left
            or self._watcher.failure
            or self._watcher.has_unseen_steps
            or explains_itself(self._watcher, ending.error)
        ):
            return
        # If the user interrupts this wait, the script keeps its own ending.
        with contextlib.suppress(KeyboardInterrupt):
            loss = self.recorder.lost_loss
            if loss is None or not self.recorder.awaits_decision(loss):
                self.recorder.give_up_loss()
            if not self.recorder.is_under_way:
                self._ended_after_backward(is_cut=bool(ending.code))
                self._ended_between_steps()
            elif ending.code or self.recorder.lost_loss is not None:
                self._ended_in_a_step(ending)
        self.recorder.forget()

    def _ended_in_a_step(self, ending: ScriptEnd) -> None:
        """Investigate the step in which the script ended before a backward pass."""
        self._watcher.learn()
        step, loss = self._watcher.log.closed(), self.recorder.lost_loss
        how = f"the script raised {named_error(ending.error)}" if ending.error else f"{EXITED} {ending.code}"
        if self._investigates:
            self._observer.ended_in(step)
        made, why_not = self._tried(
            "loss", lambda: self._investigated(self._live(step, "loss", loss, is_cut=loss is None))
        )
        if made is not None or self._watcher.log.batch or not ending.code:
            loss_of_step = made.low.loss if made is not None else math.nan
            is_taken = bool(ending.code) or (loss is not None and self.recorder.has_gradients_of(loss))
            self._watcher.log.end_without_backward(loss_of_step, is_skipped=not is_taken)
        else:
            self.why_ended = f"{how} in step {step}, after a forward pass without a backward pass"
            is_said = ending.error is not None and named_error(ending.error) in why_not
            self.why_ended += f"; {why_not}" * (bool(why_not) and not is_said)

    def _ended_after_backward(self, *, is_cut: bool) -> None:
        """Investigate the step in which the script ended after a backward pass. For example, the script checks its
        gradients, or too few micro-batches are left for a step."""
        why = self._watcher.nonfinite_in_open_step(is_cut=is_cut)
        if why is not None and (is_cut or not self._is_shown):
            self._investigate_at_end(self._watcher.log.closed(), why)

    @property
    def _is_shown(self) -> bool:
        return bool(self.found or self.captures.written)

    def _ended_between_steps(self) -> None:
        """Investigate the last step if it was withheld, and no failing step is investigated or captured."""
        for last in self._watcher.steps[-1:]:
            if last.skipped and not self._is_shown and self.recorder.has_losses:
                self._investigate_at_end(last.step, "gradients" if math.isfinite(last.loss) else "loss")

    def _investigate_at_end(self, number: int, why: Why) -> None:
        if self._looked_at < number and self._policy.is_open(why):
            self._looked_at = number
            self._investigate_live(number, why)

    def seen(self, record: Record, exit_code: int = 0) -> Record:
        """Return a record of the loop with its investigations and captures."""
        self.captures.start = with_rank(self.captures.start)
        start, captures, steps = self.captures.start, self.captures, self._watcher.log.closed()
        parts = [made for made in self.found if made.reach == "modules"]
        notes = [*dict.fromkeys(self._notes), *(MODULES_ALONE.format(made.step, made.why_no_further) for made in parts)]
        notes += [*filter(None, dict.fromkeys(self._not_compared.values())), *filter(None, [captures.why_not])]
        notes += [PUT_OFF.format(counted(self._policy.put_off, "skipped step"))] * bool(self._policy.put_off)
        notes += [NOT_REACHED.format(captures.wanted, counted(steps, "step"))] * (captures.wanted >= steps > 0)
        error = "\n".join(filter(None, (record.error, self.why_ended)))
        run = ScriptRun(
            start.name,
            start.arguments,
            start.is_module,
            exit_code,
            tuple(map(str, captures.written)),
            start.rank,
            start.processes,
        )
        unseen = replace(record.unseen, notes=(*record.unseen.notes, *notes))
        return replace(record, unseen=unseen, script=run, investigations=tuple(self.found), error=error)


def _recorded(
    whole: Callable[[], RecordedStep], modules: Callable[[], RecordedStep], why: Why, *, is_cut: bool
) -> tuple[RecordedStep, str]:
    """Return the whole step. For a lost loss, return its modules alone if need be, and the reason."""
    try:
        return (modules(), ENDED_EARLIER) if is_cut else (whole(), "")
    except NotReplayableError as reason:
        if why == "loss":
            with contextlib.suppress(NotReplayableError):
                return modules(), str(reason)
        raise


def settles(made: Investigation) -> bool:
    """True if the step only needs a lower loss scale, to which the scaler is settling."""
    return made.why == "gradients" and is_finite(made.fp32) and survivor(made) is not None


def _why_finite(live: LiveStep) -> str:
    """Return what a finite replay says of a step that failed."""
    if live.recorded.reach == "whole":
        return "its replay is finite"
    own_code = "the script's own code after them could not be replayed"
    return f"every module output is finite, and {own_code}: {live.why_no_further}"


def _why_not_judged(made: Investigation) -> str:
    """Return why a comparison with FP32 shows nothing."""
    if made.reference.error:
        return f"its replay in FP32 failed: {made.reference.error}"
    return f"its loss was {number(made.loss)}, and its replay has {number(made.low.loss)}"


def explains_itself(watcher: Watch, error: BaseException | None) -> bool:
    """True if the script's error already explains the problem."""
    by_autocast = autocast_error(error, watcher.log.closed(), watcher.models.named_modules)
    return by_autocast is not None or watcher.calls.explains(error)
