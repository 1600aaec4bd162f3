"""The replays that show the fault of a step, compared with FP32."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval

from ampdbg.agreement import (
    AGREEMENT,
    BEYOND_NOISE,
    GRADIENT_WARNING,
    NOISE_FLOORS,
    agrees,
    is_beyond_noise,
    is_finite,
    keeps_its_gradients,
)
from ampdbg.diagnosis.losses import losses_of, may_have_risen
from ampdbg.diagnosis.producers import culprit, overflow_in
from ampdbg.formats import FLOAT16, FORMATS
from ampdbg.observer import Observer
from ampdbg.ops import CASTS, CODE_CONSTANTS, base_name
from ampdbg.probes.garbage import seldom_collected
from ampdbg.probes.op_trace import OpKey, OpSeen
from ampdbg.probes.producer_trace import (
    Circumstances,
    ProducerTrace,
    ReplacedProducerTrace,
    Sampled,
    SampleTrace,
)
from ampdbg.probes.source_lines import source_of
from ampdbg.probes.tensors import bad_data, distinct, float_values, may_be_bad
from ampdbg.record.findings import Count
from ampdbg.record.run import Investigation, Producer, Reach, Replay, Step, TensorCounts
from ampdbg.replay.copies import altered_batch
from ampdbg.replay.replay import FP32, Manner, Replayed, TraceKind, continued_in_fp32, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot
from ampdbg.replay.step import Half, RecordedStep

Why = Literal["loss", "gradients", "end"]

CONTINUED_STEPS = 10
"""The number of FP32 steps on the same batch that distinguish a diverging learning rate from an FP16 overflow."""

PRODUCERS_KEPT = 20
"""The most producers of one kind in the record; the first of them counts. Intended producers are a separate kind:
constants, and ops that are not finite in FP32 either. So masks, one a layer, do not displace later faults."""

MOST_OF_IT = 0.5
"""A gradient has lost most of itself if a larger share of its sum of squares is flushed to zero."""

DEPARTURE = 16.0
"""A magnitude this many times FP32's is not rounding but a division by almost zero, or a cancellation."""

NEARLY_LOWEST = 0.9 * FLOAT16.largest
"""The magnitude that the lowest number of FP16 keeps when a score is added."""

ROUNDINGS = 4
"""The number of ways to round the weights that show how far rounding can lead. If FP32 chooses between near values,
such as neighbors, one way may change nothing and another everything."""

FEW_VALUES, SEVERAL = 16, 4.0
"""A sample with fewer values does not show the noise. A distance under ``SEVERAL`` roundings is not an error."""

WRONG_ANGLES = 0.1
"""The distance of a sine from FP32's if its angles are off by a tenth of a radian."""

OpRun = tuple[OpKey, int]
"""An op and the number of its run: all its runs have the same key."""

NEVER_FINITE, ALWAYS_FINITE = (0.0, False), (0.0, True)
"""The assumed magnitude and finiteness of an op that does not run in FP32: never finite, or always finite."""

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
    largest = _largest_in(snapshot)
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
            at_scale = None if _overflows_on_the_way(made.low) else self._at_scale
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
        fp32 = self._fp32(traced=self._producers if low.overflows else None, keep_gradients=True)
        noise = self._floor(fp32)
        replay, floor = compared_with_fp32(low, fp32, noise, self._at_scale)
        distance = replay.gradient_distance or 0.0
        if distance > AGREEMENT:
            replay = self._with_erased(low, replay)
        if distance > GRADIENT_WARNING:
            floor = floor or noise.floor.replay
        made = Investigation(self._snapshot.step, "end", replay, producers_of(fp32, fp32), floor=floor)
        if low.angular:
            sampled, reference = self._low(traced=SampleTrace), self._fp32(traced=SampleTrace)
            angles = rounded_angles(sampled, reference, low.angular)
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
        if _overflows_on_the_way(replay):
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


def _largest_in(snapshot: Snapshot) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Return the largest finite magnitude of each numeric leaf of the batches, and its index.

    The magnitude is that in float32, to which a model casts any dtype of the batch. An additive mask is not data: its
    numbers need a change, not a normalization.
    """
    largest: dict[str, tuple[float, tuple[int, ...]]] = {}
    for name, leaf in snapshot.data:  # several micro-batches have leaves of the same name
        values = _numbers_of(distinct(leaf))
        if values is not None and values.numel() and not _is_mask(values):
            finite = torch.where(torch.isfinite(values), values.detach().abs(), 0.0)
            at = torch.unravel_index(finite.argmax(), finite.shape)
            value = float(finite.max()), tuple(map(int, at))
            largest[name] = max(largest.get(name, value), value)
    return largest


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


# A replay, compared with FP32: producers of inf and NaN, gradients, and samples of every op


def producers_of(replayed: Replayed, fp32: Replayed, most: int = PRODUCERS_KEPT) -> Replay:
    """Return the replay with its producers, each compared with the same op in FP32; at most ``most`` of a kind.

    They are in order of execution, but with a NaN loss the producers that caused it come first. With a finite loss, the
    producers in the forward pass that make gradients non-finite come first.
    """
    trace = replayed.trace
    if not isinstance(trace, ProducerTrace):
        return replayed.replay
    largest_by_op = fp32.trace.largest_by_op if fp32.trace else {}
    harmless = {
        index for index in trace.harmless if largest_by_op.get(trace.ops[index].key, NEVER_FINITE)[0] > FLOAT16.largest
    }
    # The code writes these infinities as constants, in FP32 too.
    constants = ((index, seen) for index, seen in enumerate(trace.ops) if base_name(seen.op) in CODE_CONSTANTS)
    meant = {index for index, seen in constants if not largest_by_op.get(seen.key, NEVER_FINITE)[1]}
    reaching = _reaching_gradients(trace, largest_by_op) - meant if math.isfinite(replayed.replay.loss) else set()
    producing = {index for index, seen in enumerate(trace.ops) if seen.produces}
    starts = sorted((producing - harmless - meant) | reaching)
    if math.isnan(replayed.replay.loss):
        # An infinity that causes no NaN is intended, such as a mask's logarithm, or has no effect.
        chief = trace.poisonous if fp32.trace else trace.poisonous | trace.divisors  # FP32 shows what else went wrong
    else:
        chief = {index for index in reaching if trace.ops[index].place.phase == "forward"}
    starts.sort(key=lambda index: index not in chief)
    if replayed is fp32 and not starts:
        # The script's own infinities, such as masks, become NaN somewhere: in a softmax over nothing but -inf.
        starts = [at for at, seen in enumerate(trace.ops) if seen.makes_nan or at == trace.given_bad][:1]
    makers = _Makers(trace.ops, largest_by_op)
    found: dict[Producer, None] = {}
    kept = Counter[tuple[str, bool, bool]]()
    for i in starts:
        seen, circumstances = trace.ops[i], trace.circumstances.get(i, Circumstances())
        is_no_fault = circumstances.is_constant or not largest_by_op.get(seen.key, ALWAYS_FINITE)[1]
        kind = seen.place.phase, is_no_fault, seen.output.nan > 0
        if kept[kind] >= most:
            continue
        departure = makers.departure(i, replayed.replay.scale)
        if departure is not None and not circumstances.is_constant and circumstances.leaf is None:
            seen, circumstances = departure, Circumstances()
        producer = _producer(seen, largest_by_op.get(seen.key), circumstances)
        producer = replace(producer, reaches_gradients=i in reaching, is_given=i == trace.given_bad)
        kept[kind] += producer not in found
        found[producer] = None
    return replace(replayed.replay, producers=tuple(found))


def _reaching_gradients(trace: ProducerTrace, met: Mapping[OpKey, tuple[float, bool]]) -> set[int]:
    """Return the ops, of either pass, where the non-finite values in the gradients start.

    An op such as a softmax may compute NaN from earlier infinities. It counts only if it does so in FP32 too, or if no
    op starts them.
    """
    found = trace.in_gradients
    begin = {index for index in found if trace.ops[index].produces}
    return {
        index for index in found if index in begin or not begin or not met.get(trace.ops[index].key, ALWAYS_FINITE)[1]
    }


def _compared_gradients(low: Replayed, fp32: Replayed, floor: Replayed | None = None) -> dict[str, Any]:
    """Return the fields of a Replay that compare its gradients with FP32's; ``floor`` shows which gradients are noise.

    A gradient that could not change any weight in FP32 is left out.
    """
    moving = {name: gradient for name, gradient in fp32.gradients.items() if name not in fp32.idle}
    distance = _distance(low.gradients, moving)
    if not moving and _distance(low.gradients, fp32.gradients) == 0.0:
        distance = 0.0
    squares = {name: float(gradient.double().square().sum()) for name, gradient in moving.items()}
    lost = {name: _flushed(low.gradients.get(name), gradient) for name, gradient in moving.items()}
    total = sum(squares.values())
    return {
        "gradient_distance": distance,
        "lost_energy": sum(lost.values()) / total if 0 < total < math.inf else None,
        "lost": tuple(
            name
            for name, share in lost.items()
            if share > MOST_OF_IT * squares[name] and not _is_noise(name, fp32, floor)
        ),
    }


@dataclass(frozen=True)
class Noise:
    """FP32 on weights rounded to ``dtype``, replayed on first use. ``replayed`` makes a replay with its gradients.
    ``known`` is the floor from an investigation of the same step."""

    fp32: Replayed
    dtype: str
    replayed: Callable[[Manner], Replayed]
    known: Replay | None = None

    @property
    def floor(self) -> Replayed:
        """The rounding with the gradients furthest from FP32's, and with the furthest loss."""
        return self._furthest[1]

    @property
    def manner(self) -> Manner:
        """The manner in which the floor was rounded."""
        return self._furthest[0]

    @cached_property
    def _furthest(self) -> tuple[Manner, Replayed]:
        manners = (Manner("float32", rounds_to=self.dtype, draw=draw) for draw in range(ROUNDINGS))
        return functools.reduce(self._further, ((manner, self._compared(manner)) for manner in manners))

    def _compared(self, manner: Manner) -> Replayed:
        made = self.replayed(manner)
        return replace(made, replay=replace(made.replay, **_compared_gradients(made, self.fp32)))

    def _further(self, one: tuple[Manner, Replayed], other: tuple[Manner, Replayed]) -> tuple[Manner, Replayed]:
        """Return the rounding with the further gradients, and with the further of the two losses."""
        replays = (one[1].replay, other[1].replay)
        if not all(map(is_finite, replays)):
            return one
        manner, made = max(one, other, key=lambda noise: noise[1].replay.gradient_distance or 0.0)
        loss = max((replay.loss for replay in replays), key=lambda each: abs(each - self.fp32.replay.loss))
        return manner, replace(made, replay=replace(made.replay, loss=loss))


HIGHER = (2.0**6, 2.0**12, 2.0**20)
"""The multiples of the loss scale at which to search for a gradient that was flushed to zero."""


def compared_with_fp32(
    low: Replayed,
    fp32: Replayed,
    noise: Noise,
    at_scale: Callable[[float], Replayed] | None,
    most: int = PRODUCERS_KEPT,
) -> tuple[Replay, Replay | None]:
    """Return the replay with its producers and distances from FP32, and the noise floor if the distances are too large.

    A gradient that is zero at any loss scale was not flushed, even if it is not zero in FP32. The code may have made a
    different choice, such as the box that an object is matched to. It may have rounded to a flat part of a function, or
    the forward pass overflows. The replay names such parameters, and the rest is compared. ``at_scale`` makes the same
    replay at another scale; it is used only if no overflow is known in the forward pass.
    """
    replay = replace(producers_of(low, fp32, most), **_compared_gradients(low, fp32))
    if at_scale and not _overflows_on_the_way(replay) and (unreached := _unreached(replay, at_scale)):
        reached = {name: gradient for name, gradient in fp32.gradients.items() if name not in unreached}
        fp32 = replace(fp32, gradients=reached)
        replay = replace(replay, unreached=unreached, **_compared_gradients(low, fp32))
    is_near = agrees(replay, fp32.replay, None) and keeps_its_gradients(replay)
    if is_near or not (is_finite(replay) and is_finite(fp32.replay)):
        return replay, None
    if noise.known is not None and not replay.lost:  # else its gradients show which lost ones are noise
        return replay, noise.known
    return replace(replay, **_compared_gradients(low, fp32, noise.floor)), noise.floor.replay


def _overflows_on_the_way(replay: Replay) -> bool:
    """True if an op that is not a constant overflows in the forward pass, but not in FP32."""
    forward = (one for one in replay.producers if one.phase == "forward")
    return any(one.finite_in_fp32 is not False and not one.is_constant for one in forward)


def _unreached(low: Replay, at_scale: Callable[[float], Replayed]) -> tuple[str, ...]:
    names = low.lost
    for factor in HIGHER:
        if names:
            found = at_scale(low.scale * factor).gradients
            names = tuple(name for name in names if name not in found or not _holds_something(found[name]))
    return names


def _holds_something(gradient: torch.Tensor) -> bool:
    return bool(((gradient != 0) & torch.isfinite(gradient)).any())


def departure(low: Replayed, fp32: Replayed, floor: Replayed) -> dict[str, Any]:
    """Return the fields of an Investigation that say where a step departs from FP32.

    That is the first op with a result far from FP32's, and further than rounded weights alone move it. It may also be
    the start of an error that a later op enlarges, as in a long sum. Its distance is then too many times the noise for
    layers to add up to. An op may take different elements than in FP32, by indices or a mask. Then the fields name both
    the op whose rounding decides this and the op that takes them. Gradients are compared at a loss scale of 1.
    """
    several_roundings = SEVERAL * 2.0 ** -FORMATS.get(low.replay.dtype, FLOAT16).precision
    reference, rounded, lowered = (_by_place(one) for one in (fp32, floor, low))
    for key, one in lowered.items() if rounded else ():
        own, noise = reference.get(key), rounded.get(key)
        if own is None or not one.seen.output.size:
            continue
        distance, by_rounding = _relative(one, own), _relative(noise, own) if noise else None
        is_far = distance is not None and distance > max(AGREEMENT, NOISE_FLOORS * (by_rounding or 0.0))
        is_many = by_rounding is not None and one.sample.numel() >= FEW_VALUES  # one value may not change by luck
        limit = max(several_roundings, BEYOND_NOISE * (by_rounding or 0.0))
        departs = is_far or (is_many and distance is not None and distance > limit)
        is_weightless = noise is not None and noise.taken == own.taken  # rounded weights alone do not change the choice
        if (one.taken != own.taken and (departs or is_weightless)) or (departs and one.picked != own.picked):
            found = _decider(key, lowered, reference)
            return {"first_far": _far(lowered[found], reference[found]), "choice": _far(one, own)}
        if departs:
            return {"first_far": _far(one, own)}
    return {}


def rounded_angles(low: Replayed, fp32: Replayed, angular: Mapping[OpKey, str]) -> tuple[Producer, ...]:
    """Return the ``angular`` ops, sines and cosines, that are far from FP32's, with the dtype of their angles. The
    furthest comes first. Angles that are whole numbers are exact, so their results are not among these."""
    reference, lowered = _by_place(fp32), _by_place(low)
    both = ((key[0], one, reference[key]) for key, one in lowered.items() if key[0] in angular and key in reference)
    wrong = ((key, _far(one, own)) for key, one, own in both if (_relative(one, own) or 0.0) > WRONG_ANGLES)
    far = (replace(found, dtype=angular[key]) for key, found in wrong)
    return tuple(sorted(far, key=lambda found: -(found.distance or 0.0)))


def _decider(choice: OpRun, lowered: Mapping[OpRun, Sampled], reference: Mapping[OpRun, Sampled]) -> OpRun:
    """Return the first op of the same module call that differs from FP32 and decides which elements are taken. If there
    is none, return the op that takes them."""
    runs, taking = list(lowered), lowered[choice]
    met, left = {choice}, set(taking.choosers or taking.makers)
    while left:
        run = runs[left.pop()]
        one, own = lowered[run], reference.get(run)
        is_equal = own is not None and one.picked == own.picked and torch.equal(one.sample, own.sample)
        if run not in met and one.seen.place[:3] == taking.seen.place[:3] and not is_equal:
            met.add(run)
            left |= one.makers
    # FP32 has the same cast to half, or none, so the op that uses the cast is named.
    computed = [run for run in runs if run in met & reference.keys() and lowered[run].seen.output.size]
    return next(run for run in computed if base_name(lowered[run].seen.op) not in CASTS)


def _far(one: Sampled, fp32: Sampled) -> Producer:
    return replace(_producer(one.seen, None, Circumstances()), distance=_relative(one, fp32))


class _Makers:
    """The ops of a replay by their output magnitude: the largest input of each op is the largest output of another.

    ``met`` has FP32's magnitude of each op. A cast only forwards its input, and FP32 has no autocast casts, so searches
    skip casts.
    """

    def __init__(self, ops: Sequence[OpSeen], met: Mapping[OpKey, tuple[float, bool]]) -> None:
        self._ops = ops
        self._met = met

    @cached_property
    def _made(self) -> Mapping[tuple[float, str], list[int]]:
        made: dict[tuple[float, str], list[int]] = {}
        for index, seen in enumerate(self._ops):
            if seen.output.is_finite:
                made.setdefault((seen.output.largest, seen.place.phase), []).append(index)
        return made

    def departure(self, index: int, scale: float) -> OpSeen | None:
        """Return the first op on the way to the op at ``index`` with values far larger than FP32's.

        The way back goes from each op to the latest earlier op that made its largest input.
        """
        found, largest, phase = None, self._ops[index].inputs.largest, self._ops[index].place.phase
        while earlier := bisect_left(made := self._made.get((largest, phase), ()), index):
            index = made[earlier - 1]
            seen = self._ops[index]
            fp32, is_finite = self._met.get(seen.key, ALWAYS_FINITE)
            is_cast, at = base_name(seen.op) in CASTS, scale if phase == "backward" else 1.0
            if not is_cast and (not fp32 or not is_finite or largest < DEPARTURE * fp32 * at):
                break
            found, largest = found if is_cast else seen, seen.inputs.largest
        return found


def _by_place(replayed: Replayed) -> dict[OpRun, Sampled]:
    """Return the ops of a trace in order, by key and run, with gradients at a loss scale of 1."""
    runs, found = Counter[OpKey](), dict[OpRun, Sampled]()
    for one in replayed.sampled:
        key, is_gradient = one.seen.key, one.seen.place.phase == "backward"
        found[key, runs[key]] = replace(one, sample=one.sample / replayed.replay.scale) if is_gradient else one
        runs[key] += 1
    return found


def _relative(one: Sampled, fp32: Sampled) -> float | None:
    """Return the norm of the difference over the reference norm; None if they cannot be compared."""
    sample, reference = one.sample, fp32.sample
    if sample.shape != reference.shape:
        return None
    # Leave out intended values: infinities in both, and masks of each dtype's lowest number with scores added. A sample
    # of zeros alone shows nothing about sizes.
    are_masked = (sample <= -NEARLY_LOWEST) & (reference <= -NEARLY_LOWEST)
    same = (sample == reference) | are_masked
    norm = float(reference[~same].norm()) if bool((~same).any()) else 0.0
    difference = float((sample - reference)[~same].norm())
    return difference / norm if 0 < norm < math.inf and math.isfinite(difference) else None


def _distance(low: Mapping[str, torch.Tensor], fp32: Mapping[str, torch.Tensor]) -> float | None:
    """Return the norm of the difference over FP32's norm; 0 for equal gradients, zeros too."""
    difference = total = 0.0
    for name, reference in fp32.items():
        total += float(reference.double().square().sum())
        other = low.get(name)
        difference += float((reference.double() - (0.0 if other is None else other.double())).square().sum())
    if fp32 and difference == 0.0:
        return 0.0
    return math.sqrt(difference / total) if 0 < total < math.inf and math.isfinite(difference) else None


def _flushed(low: torch.Tensor | None, fp32: torch.Tensor) -> float:
    """Return the sum of squares of FP32's gradient where the low-precision gradient is exactly zero."""
    squares = fp32.double().square()
    return float(squares.sum() if low is None else squares[low == 0].sum())


def _is_noise(name: str, fp32: Replayed, floor: Replayed | None) -> bool:
    """True if a gradient is only rounding noise: with different rounding, most of the gradient changes."""
    if floor is None or name not in floor.gradients:
        return False
    distance = _distance({name: floor.gradients[name]}, {name: fp32.gradients[name]})
    return distance is None or distance > MOST_OF_IT


def _producer(seen: OpSeen, fp32: tuple[float, bool] | None, circumstances: Circumstances) -> Producer:
    largest, finite = fp32 or (None, None)
    return Producer(
        phase=seen.place.phase,
        module=seen.place.module,
        call=seen.place.call,
        op=seen.op,
        source=source_of(seen.place.line) if seen.place.line else None,
        dtype=seen.output.dtype,
        input_largest=seen.inputs.largest,
        output_largest=seen.output.largest,
        inf=seen.output.inf,
        nan=seen.output.nan,
        size=seen.output.size,
        parameter=seen.parameter,
        fp32_largest=largest,
        finite_in_fp32=finite,
        is_constant=circumstances.is_constant,
        divides_by_zero=circumstances.divides_by_zero,
        leaf=circumstances.leaf,
        made_half=circumstances.made_half,
    )
