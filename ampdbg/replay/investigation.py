"""Decides which steps to replay, and makes the replays that show the fault of a step."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval

from ampdbg.agreement import AGREEMENT, GRADIENT_WARNING, agrees, is_beyond_noise, is_finite, is_same_run
from ampdbg.diagnosis.cause import SKIPS_IN_A_ROW
from ampdbg.diagnosis.losses import losses_of, may_have_risen
from ampdbg.diagnosis.producers import culprit, overflow_in
from ampdbg.diagnosis.scale import is_nan_alone
from ampdbg.formats import FLOAT16
from ampdbg.observer import Observer
from ampdbg.probes.garbage import seldom_collected
from ampdbg.probes.producer_trace import ProducerTrace, ReplacedProducerTrace, SampleTrace
from ampdbg.probes.tensors import are_weights_spoilt, bad_data, distinct, float_values, may_be_bad, nonfinite
from ampdbg.probes.watch import Watch
from ampdbg.quantities import number
from ampdbg.record.findings import Count
from ampdbg.record.run import Investigation, Reach, Replay, Step, TensorCounts
from ampdbg.replay.comparison import (
    PRODUCERS_KEPT,
    Noise,
    compared_with_fp32,
    departure,
    overflows_on_the_way,
    producers_of,
    rounded_angles,
)
from ampdbg.replay.copies import altered_batch
from ampdbg.replay.replay import FP32, Manner, Replayed, TraceKind, continued_in_fp32, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import ModelState, Snapshot, take_snapshot
from ampdbg.replay.step import Half, RecordedStep

Why = Literal["loss", "gradients", "end"]

CONTINUED_STEPS = 10
"""The number of FP32 steps on the same batch that distinguish a diverging learning rate from an FP16 overflow."""

INTEGERS = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)

ROUNDED = "FP32 on rounded weights"

MOST_ERASED = 5
"""The most producers of a backward pass that are tried, each by a replay."""

TRIES = 3
"""The number of replays of a step before ampdbg reports that it does not fail again."""


def investigate(
    run: Run,
    snapshot: Snapshot,
    why: Why,
    scale: float,
    *,
    before: Sequence[Step],
    observer: Observer,
) -> Investigation:
    """Replay a step until its cause is known; the model, its optimizers and the random state stay unchanged.

    Args:
        run: the workload, with the weights of the step.
        snapshot: the step.
        why: the reason. ``loss``: the loss is not finite. ``gradients``: the loss is finite, but the gradients are not.
            ``end``: no fault is known; the replays search for one that no loss and no gradient shows.
        scale: the loss scale of the step.
        before: the earlier steps of its optimizer; none if its loss is not to be compared with theirs.
        observer: is notified before each replay.
    """
    replays = _Replays(run, snapshot, scale, observer)
    with seldom_collected():
        made = replays.of_hidden_fault() if why == "end" else replays.of_fault(why, before)
    largest: dict[str, tuple[float, tuple[int, ...]]] = {}
    for name, value in _largest_in(snapshot):  # several micro-batches have leaves of the same name
        largest[name] = max(largest.get(name, value), value)
    return replace(
        made,
        batch_largest={name: value for name, (value, _) in largest.items()},
        batch_index={name: index for name, (_, index) in largest.items()},
    )


@dataclass(frozen=True)
class StepFacts:
    """What is known of a recorded step besides its calls.

    Attributes:
        step: its number, counted from 0.
        scale: the loss scale.
        loss: the loss without the script's own scale factor; NaN without a loss.
        why: the reason for an investigation.
        half: the half dtype of the step, or None for a step in FP32.
        reach: whether the whole step or only its modules are recorded.
        weights_grew: as in an Investigation.
        scaler_number: the number in the record of the loss's scaler; 0 if there is none.
        optimizer: the index of the optimizer that steps.
    """

    step: Count
    scale: Annotated[float, Interval(gt=0, le=2.0**127)]
    loss: float
    why: Why
    half: Half | None
    reach: Reach = "whole"
    weights_grew: float = 1.0
    scaler_number: Count = 0
    optimizer: Count = 0

    def before(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Return the steps with which the loss is compared; none if it is a sum of module outputs."""
        return tuple(one for one in steps if one.optimizer == self.optimizer) if self.reach == "whole" else ()

    def investigated(self, run: Run, snapshot: Snapshot, steps: Sequence[Step], observer: Observer) -> Investigation:
        """Replay the step after these ``steps`` until its cause is known."""
        before = self.before(steps)
        made = investigate(run, snapshot, self.why, self.scale, before=before, observer=observer)
        return replace(made, loss=self.loss, reach=self.reach, weights_grew=self.weights_grew)


class _Replays:
    """Makes the replays of one step, one after another."""

    def __init__(self, run: Run, snapshot: Snapshot, scale: float, observer: Observer) -> None:
        self._run = run
        self._snapshot = snapshot
        self._observer = observer
        self._as_it_was = Manner(run.mode.format.name, scale, is_lifted=False)
        self._producers = functools.partial(ProducerTrace, data=snapshot.data)

    def of_fault(self, why: Why, before: Sequence[Step]) -> Investigation:
        """Replay a step with a loss or gradients that are not finite."""
        for tries in range(1, TRIES + 1):
            low = self._low(traced=self._producers, stops_at_loss=why == "loss", keep_gradients=why == "gradients")
            failed = fails(low.replay, why)
            made = Investigation(self._snapshot.step, why, low.replay, reproduced=int(failed), tries=tries)
            if failed:
                break
        else:
            return made
        fp32 = self._fp32(traced=self._producers, keep_gradients=why == "gradients")
        made = replace(made, low=producers_of(low, fp32), fp32=producers_of(fp32, fp32))
        if why == "gradients" and is_finite(fp32.replay):
            made = replace(made, low=self._with_erased(low, made.low))
            at_scale = None if overflows_on_the_way(made.low) else self._at_scale
            at_lower, floor = self._at_lower_scales(fp32, at_scale)
            made = replace(made, at_lower=at_lower, floor=floor)
        made = replace(made, wide=self._wider(fp32.replay))
        may_diverge = may_have_risen(losses_of(before), fp32.replay.loss)
        if may_diverge and not fp32.replay.error:
            self._observer.replay(self._snapshot.step, f"{CONTINUED_STEPS} steps in FP32")
            made = replace(made, continuation=continued_in_fp32(self._run, self._snapshot, CONTINUED_STEPS))
        return made

    def of_hidden_fault(self) -> Investigation:
        """Replay a step that looks healthy: twice, and further only if the two replays differ."""
        low = self._low(traced=self._producers, keep_gradients=True)
        overflows = any(op.produces for op in low.trace.ops) if low.trace else False
        fp32 = self._fp32(traced=self._producers if overflows else None, keep_gradients=True)
        noise = self._floor(fp32)
        replay, floor = compared_with_fp32(low, fp32, noise, self._at_scale)
        if (replay.gradient_distance or 0.0) > AGREEMENT:
            replay = self._with_erased(low, replay)
        if (replay.gradient_distance or 0.0) > GRADIENT_WARNING:
            floor = floor or noise.floor.replay
        made = Investigation(self._snapshot.step, "end", replay, producers_of(fp32, fp32), floor=floor)
        if isinstance(low.trace, ProducerTrace) and low.trace.angular:
            sampled, reference = self._low(traced=SampleTrace), self._fp32(traced=SampleTrace)
            angles = rounded_angles(sampled, reference, low.trace.angular)
            made = replace(made, rounded_angles=angles[:PRODUCERS_KEPT])
        is_near = agrees(replay, fp32.replay, None) and not is_beyond_noise(replay, floor)
        if floor is None or is_near or overflow_in(made):  # the overflow explains the distance
            return made
        low, fp32 = self._low(traced=SampleTrace), self._fp32(traced=SampleTrace)
        return replace(made, **departure(low, fp32, self._replay(ROUNDED, noise.manner, traced=SampleTrace)))

    def _with_erased(self, low: Replayed, replay: Replay) -> Replay:
        """Mark the producers that no gradient depends on, up to the first with an effect.

        For each producer the step is replayed with a finite number instead of its inf and NaN. If a closed ReLU turns
        the result into zeros, all gradients are the same to the last bit.
        """
        producers = list(replay.producers)
        if overflows_on_the_way(replay):
            return replay
        found = [one for one in enumerate(producers) if one[1].phase == "backward" and one[1].inf + one[1].nan]
        for place, producer in found[:MOST_ERASED] if replay.gradients == () or len(found) > 1 else ():
            mended = functools.partial(ReplacedProducerTrace, producer=producer)
            other = self._replay("a gradient's inf mended", self._as_it_was, traced=mended, keep_gradients=True)
            if not _are_same(low.gradients, other.gradients):
                break
            producers[place] = replace(producer, is_erased=True)
        return replace(replay, producers=tuple(producers))

    def _low(self, traced: TraceKind | None = None, **how: bool) -> Replayed:
        return self._replay(f"{self._run.mode.format.short}, every op", self._as_it_was, traced=traced, **how)

    def _fp32(self, traced: TraceKind | None = None, keep_gradients: bool = False) -> Replayed:
        return self._replay("FP32", FP32, traced=traced, keep_gradients=keep_gradients)

    def _floor(self, fp32: Replayed) -> Noise:
        replayed = functools.partial(self._replay, ROUNDED, keep_gradients=True)
        return Noise(fp32, self._as_it_was.dtype, replayed)

    def _wider(self, fp32: Replay) -> Replay:
        """Replay in FP64 if FP32 is not finite; else in bfloat16, with FP32's range and less precision than FP16."""
        if is_finite(fp32):
            return self._replay("bfloat16", Manner("bfloat16")).replay
        return self._replay("FP64", Manner("float64")).replay

    def _at_lower_scales(
        self, fp32: Replayed, at_scale: Callable[[float], Replayed] | None
    ) -> tuple[tuple[Replay, ...], Replay | None]:
        """Replay at S/2, S/8, S/32 … 1, up to the first loss scale at which every gradient is finite. Also return the
        noise floor if that replay is far from FP32."""
        found: list[Replay] = []
        scale, factor = self._as_it_was.scale, 2.0
        while scale > 1.0:
            scale, factor = max(1.0, scale / factor), 4.0
            low = self._at_scale(scale)
            if is_finite(low.replay):
                replay, floor = compared_with_fp32(low, fp32, self._floor(fp32), at_scale)
                return (*found, replay), floor
            found.append(low.replay if scale > 1.0 else self._traced_at_one(fp32))
        return tuple(found), None

    def _at_scale(self, scale: float) -> Replayed:
        return self._replay(f"loss scale {scale:g}", replace(self._as_it_was, scale=scale), keep_gradients=True)

    def _traced_at_one(self, fp32: Replayed) -> Replay:
        """Return the replay at a loss scale of 1 with its producers: its gradients are not finite either."""
        manner = replace(self._as_it_was, scale=1.0)
        low = self._replay("loss scale 1, every op", manner, traced=self._producers, keep_gradients=True)
        return self._with_erased(low, producers_of(low, fp32))

    def _replay(self, doing: str, manner: Manner, traced: TraceKind | None = None, **how: bool) -> Replayed:
        self._observer.replay(self._snapshot.step, doing)
        return replay_step(self._run, self._snapshot, manner, traced=traced, **how)


def _are_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """True if all gradients are the same to the last bit, with inf and NaN in the same places."""
    if one.keys() != other.keys():
        return False
    return all(torch.allclose(one[name], other[name], rtol=0.0, atol=0.0, equal_nan=True) for name in one)


def _largest_in(snapshot: Snapshot) -> Iterator[tuple[str, tuple[float, tuple[int, ...]]]]:
    """Yield the largest finite magnitude of each numeric leaf of the batches, and its index.

    The magnitude is that in float32, to which a model casts any dtype of the batch. An additive mask is not data: its
    numbers need a change, not a normalization.
    """
    for name, leaf in snapshot.data:
        values = _numbers_of(distinct(leaf))
        if values is not None and values.numel() and not _is_mask(values):
            finite = torch.where(torch.isfinite(values), values.detach().abs(), 0.0)
            at = torch.unravel_index(finite.argmax(), finite.shape)
            yield name, (float(finite.max()), tuple(int(index) for index in at))


def _is_mask(values: torch.Tensor) -> bool:
    """True if the values are zeros and one negative number beyond FP16, which occurs several times."""
    low, high = (float(end) for end in torch.aminmax(values.detach()))
    if high > 0.0 or not -math.inf < low <= -FLOAT16.overflow_threshold:
        return False
    lowest = values == low
    return int(lowest.sum()) > 1 and bool((lowest | (values == 0.0)).all())


def _numbers_of(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a leaf in float32; None if it has none, or none on this device."""
    if leaf.dtype in INTEGERS and leaf.layout is torch.strided and not leaf.is_meta:
        return leaf.float()
    values = float_values(leaf)
    return values if values is None else values.float()


def fails(replay: Replay, why: Why) -> bool:
    """True if a replay fails like its step: in the loss, or, after a finite loss, in the loss or gradients."""
    return not (math.isfinite(replay.loss) if why == "loss" else is_finite(replay))


def is_blamed(made: Investigation) -> bool:
    """True if half precision causes an error that a step raises: FP32 is finite, and an op fails.

    A constant that overflows is mostly a mask, and does no harm.
    """
    if not made.reproduced or not made.low.error or not is_finite(made.fp32):
        return False
    suspect = culprit(made)
    return suspect is not None and not suspect.is_constant


def blamed_data(run: Run, snapshot: Snapshot, played: RecordedStep) -> tuple[TensorCounts, ...]:
    """Return the data with inf or NaN, of batch or targets, that makes the step fail in FP32.

    NaN that the script masks, such as in padded targets, does no harm. It does not explain a NaN loss with another
    cause. So the step is replayed with finite data. The data is to blame only if FP32 is then finite.

    Args:
        run: the workload; it must still have the weights of the step.
        snapshot: the step, with the arguments of its calls as batches.
        played: the calls of the step.
    """
    suspects = [
        (name, tensor)
        for name, tensor in played.data_in(played.given)
        if may_be_bad(tensor) and not tensor.requires_grad and tensor.numel() > 1  # a single number is not a sample
    ]
    has_loss = played.reach == "whole"  # else the outputs of its modules may include a mask of -inf

    def comes_through(kept: Collection[int] = ()) -> bool:
        finite = {id(tensor): _made_finite(tensor) for _, tensor in suspects if id(tensor) not in kept}
        batches = [altered_batch(batch, lambda tensor: finite.get(id(tensor), tensor)) for batch in snapshot.batches]
        again = replay_step(run, replace(snapshot, batches=tuple(batches)), FP32).replay
        return is_finite(again) or not (has_loss or again.error or math.isnan(again.loss))

    if not suspects or not comes_through():
        return ()
    alone = [one for one in suspects if len(suspects) == 1 or not comes_through({id(one[1])})]
    return tuple(bad_data(alone or suspects))


@torch.no_grad()
def _made_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the mean of its finite values, or 1, instead of inf and NaN: a number of usual size."""
    values = float_values(tensor)
    finite = values[values.isfinite()] if values is not None else torch.empty(0)
    usual = float(finite.double().mean()) if finite.numel() else 1.0
    return torch.nan_to_num(tensor.detach(), usual, usual, usual).requires_grad_(tensor.requires_grad)


OnInvestigated = Callable[[Snapshot, float, Investigation], None]
"""Called with a replayed step, its loss scale and its investigation, while the model still has the step's weights."""


class Investigator:
    """Replays steps of one run, at most ``limit`` for each reason."""

    def __init__(
        self, run: Run, watcher: Watch, limit: int, observer: Observer, on_investigated: OnInvestigated | None
    ) -> None:
        self.found: list[Investigation] = []
        self._run = run
        self._watcher = watcher
        self._limit = limit
        self._observer = observer
        self._on_investigated = on_investigated
        self._is_low = run.mode.dtype is not torch.float32
        self._first = ModelState.now(run.workload.model)
        self._tried: Counter[Why] = Counter()
        self._skips_in_a_row = 0
        self._lowest_that_worked = math.inf
        self._latest: Snapshot | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on each step that looks healthy but has another loss in its replay: it was not compared with FP32."""
        others = [made for made in self.found if made.why == "end" and math.isfinite(made.low.loss)]
        return tuple(
            f"step {made.step} was not compared with FP32: its replay has a loss of {number(made.low.loss)} "
            f"instead of {number(made.loss)}, as where a step draws its own random numbers"
            for made in others
            if not is_same_run(made)
        )

    def snapshot(self, batches: tuple[Any, ...]) -> Snapshot:
        """Return the step that is about to run, with copies of its batches if it may be replayed."""
        kept = batches if self._limit else ()
        workload = self._run.workload
        self._latest = take_snapshot(workload.model, self._watcher.log.closed(), kept, workload.step.of)
        return self._latest

    def before_update(self, snapshot: Snapshot, loss_is_finite: bool, gradients_are_finite: bool, scale: float) -> None:
        """Investigate, if necessary, between the backward pass and the optimizer: the last moment with these weights.

        A scaler's gradients may count as finite here, because a step that it withholds keeps its weights.
        """
        is_last = snapshot.step + 1 == self._run.config.train.steps
        if not loss_is_finite:
            self._investigate(snapshot, "loss", scale)
        elif not gradients_are_finite:
            self._investigate(snapshot, "gradients", scale)
        elif (
            is_last
            and self._is_low
            and (self._skips_in_a_row == 0 or not self._withholds())
            and not any(made.why == "loss" for made in self.found)
        ):
            self._investigate(snapshot, "end", scale)

    def _withholds(self) -> bool:
        """True if the scaler will withhold the step. This is checked only after a withheld step."""
        parameters = self._run.workload.model.named_parameters()
        return any(nonfinite((name, value.grad) for name, value in parameters if value.grad is not None))

    def raised(self, *, is_told: bool) -> bool:
        """Replay the latest step after the user's code raised an error in it.

        Args:
            is_told: the error already shows that autocast is its cause, so no replay is needed to show it.

        Returns:
            True if replays show that half precision causes it: FP32 is finite. ``found`` then has the investigation.
        """
        if self._latest is None or not self._limit or not self._is_low or (is_told and self._on_investigated is None):
            return False
        if torch.is_inference_mode_enabled():  # the user's code left this mode on: no backward pass can run
            return False
        steps = self._watcher.steps
        scale = steps[-1].scale if steps else self._run.scaler().get_scale()
        with self._watcher.paused():
            made = self._replayed(self._latest, "loss", scale, steps)
            is_shown = is_blamed(made)
            if self._on_investigated is not None and (is_told or is_shown):
                self._on_investigated(self._latest, scale, made)
        if is_shown and not is_told:
            self.found.append(made)
        return is_shown

    def after_update(self, snapshot: Snapshot, step: Step) -> None:
        """Investigate, if necessary, after the update: a step that the scaler withheld still has its weights."""
        if not step.skipped:
            self._skips_in_a_row = 0
            self._lowest_that_worked = min(self._lowest_that_worked, step.scale)
        else:
            self._skips_in_a_row += 1
            # A skip right after growth is normal. A skip at a scale that has worked is investigated.
            is_new_low = self._skips_in_a_row == 1 and step.scale <= self._lowest_that_worked < math.inf
            # NaN alone may not depend on the scale. Then the scale at which the scaler settles explains nothing.
            is_new_low |= step.step == 0 and is_nan_alone(step.groups)
            # If no step was ever taken, the last step shows if a lower scale would do.
            is_last = step.step + 1 == self._run.config.train.steps and self._lowest_that_worked == math.inf
            if math.isfinite(step.loss) and (is_new_low or is_last or self._skips_in_a_row == SKIPS_IN_A_ROW):
                self._investigate(snapshot, "gradients", step.scale)
        if self.found and self.found[-1].step == step.step:
            self.found[-1] = replace(self.found[-1], loss=step.loss)

    def _investigate(self, snapshot: Snapshot, why: Why, scale: float) -> None:
        # Weights that are not finite are the fault themselves, and no replay shows more.
        if self._tried[why] >= self._limit or are_weights_spoilt(self._run.workload.model):
            return
        # If an earlier step put inf or NaN into the state, replays from the first state show how that happens.
        is_spoilt = snapshot.state.held.bad > self._first.held.bad
        begun = replace(snapshot, state=self._first) if is_spoilt else snapshot
        self._tried[why] += 1
        steps = tuple(step for step in self._watcher.steps if step.step < snapshot.step)
        with self._watcher.paused():
            made = self._replayed(begun, why, scale, steps)
            if made.reproduced == 0 and is_spoilt and self.found:
                return  # values left by the first step found caused this failure
            if self._on_investigated is not None:
                self._on_investigated(begun, scale, made)
        self.found.append(made)

    def _replayed(self, snapshot: Snapshot, why: Why, scale: float, before: Sequence[Step]) -> Investigation:
        made = investigate(self._run, snapshot, why, scale, before=before, observer=self._observer)
        self._watcher.left_by_replays |= snapshot.left
        return replace(made, weights_grew=self._watcher.optimizers.weights_grew)
