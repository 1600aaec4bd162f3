"""Compares two replays: producers of inf and NaN with the same ops in FP32, gradients, and samples of every op."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ampdbg.agreement import AGREEMENT, BEYOND_NOISE, NOISE_FLOORS, agrees, is_finite, keeps_its_gradients
from ampdbg.formats import FLOAT16, FORMATS
from ampdbg.ops import CASTS, CODE_CONSTANTS, base_name
from ampdbg.probes.op_trace import OpKey, OpSeen
from ampdbg.probes.producer_trace import Circumstances, ProducerTrace, Sampled, SampleTrace
from ampdbg.probes.source_lines import source_of
from ampdbg.record.run import Producer, Replay
from ampdbg.replay.replay import Manner, Replayed

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
    meant = {index for index, seen in enumerate(trace.ops) if _is_meant(seen, largest_by_op)}
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


def _is_meant(seen: OpSeen, met: Mapping[OpKey, tuple[float, bool]]) -> bool:
    """True if the code writes an infinity as a constant, in FP32 too."""
    return base_name(seen.op) in CODE_CONSTANTS and not met.get(seen.key, NEVER_FINITE)[1]


def compared_gradients(low: Replayed, fp32: Replayed, floor: Replayed | None = None) -> dict[str, Any]:
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
        return replace(made, replay=replace(made.replay, **compared_gradients(made, self.fp32)))

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
    at_scale: Callable[[float], Replayed] | None = None,
    most: int = PRODUCERS_KEPT,
) -> tuple[Replay, Replay | None]:
    """Return the replay with its producers and distances from FP32, and the noise floor if the distances are too large.

    A gradient that is zero at any loss scale was not flushed, even if it is not zero in FP32. The code may have made a
    different choice, such as the box that an object is matched to. It may have rounded to a flat part of a function, or
    the forward pass overflows. The replay names such parameters, and the rest is compared. ``at_scale`` makes the same
    replay at another scale; it is used only if no overflow is known in the forward pass.
    """
    replay = replace(producers_of(low, fp32, most), **compared_gradients(low, fp32))
    if at_scale and not overflows_on_the_way(replay) and (unreached := _unreached(replay, at_scale)):
        reached = {name: gradient for name, gradient in fp32.gradients.items() if name not in unreached}
        fp32 = replace(fp32, gradients=reached)
        replay = replace(replay, unreached=unreached, **compared_gradients(low, fp32))
    is_near = agrees(replay, fp32.replay, None) and keeps_its_gradients(replay)
    if is_near or not (is_finite(replay) and is_finite(fp32.replay)):
        return replay, None
    if noise.known is not None and not replay.lost:  # else its gradients show which lost ones are noise
        return replay, noise.known
    return replace(replay, **compared_gradients(low, fp32, noise.floor)), noise.floor.replay


def overflows_on_the_way(replay: Replay) -> bool:
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
    if low.trace is None or fp32.trace is None or floor.trace is None:
        return {}
    several_roundings = SEVERAL * 2.0 ** -FORMATS.get(low.replay.dtype, FLOAT16).precision
    reference, rounded, lowered = (_by_place(one) for one in (fp32, floor, low))
    for key, one in lowered.items():
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


def rounded_angles(low: Replayed, fp32: Replayed, angular: Collection[OpKey]) -> tuple[Producer, ...]:
    """Return the ``angular`` ops, sines and cosines, that are far from FP32's, the furthest first. Angles that are
    whole numbers are exact, so their results are not among these."""
    reference, lowered = _by_place(fp32), _by_place(low)
    both = ((one, reference[key]) for key, one in lowered.items() if key[0] in angular and key in reference)
    far = (_far(one, own) for one, own in both if (_relative(one, own) or 0.0) > WRONG_ANGLES)
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
    assert isinstance(replayed.trace, SampleTrace)
    runs, found = Counter[OpKey](), dict[OpRun, Sampled]()
    for one in replayed.trace.sampled:
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
