"""Two replays held against each other: producers against FP32's same op, gradients, and samples of every op."""

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
from ampdbg.ops import CASTS, WRITTEN_OUT, base_name
from ampdbg.probes.op_trace import OpKey, OpSeen
from ampdbg.probes.producer_trace import Circumstances, ProducerTrace, Sampled, SampleTrace
from ampdbg.probes.source_lines import source_of
from ampdbg.record.run import Producer, Replay
from ampdbg.replay.replay import Manner, Replayed

PRODUCERS_KEPT = 20
"""So many producers of each pass go into the record, and as many that are meant to be: constants, and what FP32 does
too. The first of a kind is the one that counts. Masks, one a layer, are not to take the room of what fails behind."""

MOST_OF_IT = 0.5
"""A gradient that loses a larger share of its sum of squares to zero has lost most of it."""

DEPARTURE = 16.0
"""So many times FP32's own magnitude is more than rounding: something was divided by almost nothing, or cancelled."""

NEARLY_LOWEST = 0.9 * FLOAT16.largest
"""Scores that are added to the lowest number of FP16 leave it as low."""

ROUNDINGS = 4
"""So many ways of rounding weights show how far rounding can lead: where FP32 has a choice to make between near values,
such as neighbours, one way may change nothing and another all."""

FEW_VALUES, SEVERAL = 16, 4.0
"""Of a sample of fewer values nothing is known of the noise, and what is nearer than so many roundings is no error."""

WRONG_ANGLES = 0.1
"""As far from FP32's is a sine of angles that are off by a tenth of a radian."""

OpRun = tuple[OpKey, int]
"""An op, and which of its runs: it has the same key in each."""

NOWHERE, UNMET = (0.0, False), (0.0, True)
"""What is known of an op that FP32 does not come by: that it is nowhere finite, or nowhere infinite."""


def producers_of(replayed: Replayed, fp32: Replayed, most: int = PRODUCERS_KEPT) -> Replay:
    """The replay with its producers, each held against the same op of the FP32 replay; ``most`` of a kind.

    They are in order of execution; those behind a NaN come first where the loss is one, and where it is finite those of
    the forward pass that gradients are not finite for.
    """
    trace = replayed.trace
    if not isinstance(trace, ProducerTrace):
        return replayed.replay
    met = fp32.trace.met if fp32.trace else {}
    harmless = {index for index in trace.harmless if met.get(trace.ops[index].key, NOWHERE)[0] > FLOAT16.largest}
    meant = {index for index, seen in enumerate(trace.ops) if _is_meant(seen, met)}
    reaching = _reaching_gradients(trace, met) - meant if math.isfinite(replayed.replay.loss) else set()
    producing = {index for index, seen in enumerate(trace.ops) if seen.produces}
    starts = sorted((producing - harmless - meant) | reaching)
    if math.isnan(replayed.replay.loss):
        # An infinity that no NaN comes of is meant, such as a mask's logarithm, or has erased itself.
        bad = trace.bad
        chief = bad.poisonous if fp32.trace else bad.poisonous | bad.divisors  # FP32 tells what else went wrong
    else:
        chief = {index for index in reaching if trace.ops[index].place.phase == "forward"}
    starts.sort(key=lambda index: index not in chief)
    if replayed is fp32 and not starts:
        # Infinities that were put in by hand, such as masks, become NaN somewhere: a softmax over nothing but -inf.
        starts = [at for at, seen in enumerate(trace.ops) if seen.makes_nan or at == trace.given_bad][:1]
    makers = _Makers(trace.ops, met)
    found: dict[Producer, None] = {}
    kept = Counter[tuple[str, bool, bool]]()
    for i in starts:
        seen, circumstances = trace.ops[i], trace.circumstances.get(i, Circumstances())
        is_no_fault = circumstances.is_constant or not met.get(seen.key, UNMET)[1]
        kind = seen.place.phase, is_no_fault, seen.output.nan > 0
        if kept[kind] >= most:
            continue
        departure = makers.departure(i, replayed.replay.scale)
        if departure is not None and not circumstances.is_constant and circumstances.leaf is None:
            seen, circumstances = departure, Circumstances()
        producer = _producer(seen, met.get(seen.key), circumstances)
        producer = replace(producer, reaches_gradients=i in reaching, is_given=i == trace.given_bad)
        kept[kind] += producer not in found
        found[producer] = None
    return replace(replayed.replay, producers=tuple(found))


def _reaching_gradients(trace: ProducerTrace, met: Mapping[OpKey, tuple[float, bool]]) -> set[int]:
    """The ops, of either pass, where what is not finite in the gradients starts.

    One that makes NaN of the infinities of others, as a softmax does, counts where it does so in FP32 too, or nothing
    else is known.
    """
    found = trace.bad.in_gradients
    begin = {index for index in found if trace.ops[index].produces}
    return {index for index in found if index in begin or not begin or not met.get(trace.ops[index].key, UNMET)[1]}


def _is_meant(seen: OpSeen, met: Mapping[OpKey, tuple[float, bool]]) -> bool:
    """The code writes out an infinity, in FP32 too."""
    return base_name(seen.op) in WRITTEN_OUT and not met.get(seen.key, NOWHERE)[1]


def compared_gradients(low: Replayed, fp32: Replayed, floor: Replayed | None = None) -> dict[str, Any]:
    """The fields of a Replay that say how its gradients stand against FP32's; ``floor`` tells which are noise.

    A gradient that could move no weight in FP32 either is left out.
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
    """FP32 on weights rounded to ``dtype``, made when it is first called for; ``replayed`` makes a replay with its
    gradients. ``known`` is what an investigation of the same step has found of the floor."""

    fp32: Replayed
    dtype: str
    replayed: Callable[[Manner], Replayed]
    known: Replay | None = None

    @property
    def floor(self) -> Replayed:
        """Of several roundings the one whose gradients are furthest from FP32's, with the loss that is."""
        return self._furthest[1]

    @property
    def manner(self) -> Manner:
        """How the floor was rounded."""
        return self._furthest[0]

    @cached_property
    def _furthest(self) -> tuple[Manner, Replayed]:
        manners = (Manner("float32", rounds_to=self.dtype, draw=draw) for draw in range(ROUNDINGS))
        return functools.reduce(self._further, ((manner, self._compared(manner)) for manner in manners))

    def _compared(self, manner: Manner) -> Replayed:
        made = self.replayed(manner)
        return replace(made, replay=replace(made.replay, **compared_gradients(made, self.fp32)))

    def _further(self, one: tuple[Manner, Replayed], other: tuple[Manner, Replayed]) -> tuple[Manner, Replayed]:
        """The one whose gradients are further away, with the loss that is further from FP32's."""
        replays = (one[1].replay, other[1].replay)
        if not all(map(is_finite, replays)):
            return one
        manner, made = max(one, other, key=lambda noise: noise[1].replay.gradient_distance or 0.0)
        loss = max((replay.loss for replay in replays), key=lambda each: abs(each - self.fp32.replay.loss))
        return manner, replace(made, replay=replace(made.replay, loss=loss))


HIGHER = (2.0**6, 2.0**12, 2.0**20)
"""At so many times the loss scale a gradient that was flushed to zero is looked for."""


def held_against(
    low: Replayed,
    fp32: Replayed,
    noise: Noise,
    at_scale: Callable[[float], Replayed] | None = None,
    most: int = PRODUCERS_KEPT,
) -> tuple[Replay, Replay | None]:
    """The replay with its producers and its distances from FP32's; and the floor, where it is too far without.

    A gradient that is zero at any loss scale was not flushed, whatever it is in FP32: the code has made another choice,
    such as which box an object is matched to, or rounds to where a function is flat; or something overflows in the
    forward pass. The replay names such parameters, and the rest is compared. ``at_scale`` makes the same replay at
    another scale, where nothing is known to overflow there.
    """
    replay = replace(producers_of(low, fp32, most), **compared_gradients(low, fp32))
    if at_scale and not overflows_on_the_way(replay) and (unreached := _unreached(replay, at_scale)):
        reached = {name: gradient for name, gradient in fp32.gradients.items() if name not in unreached}
        fp32 = replace(fp32, gradients=reached)
        replay = replace(replay, unreached=unreached, **compared_gradients(low, fp32))
    is_near = agrees(replay, fp32.replay, None) and keeps_its_gradients(replay)
    if is_near or not (is_finite(replay) and is_finite(fp32.replay)):
        return replay, None
    if noise.known is not None and not replay.lost:  # else its gradients tell which of these are noise
        return replay, noise.known
    return replace(replay, **compared_gradients(low, fp32, noise.floor)), noise.floor.replay


def overflows_on_the_way(replay: Replay) -> bool:
    """Anything but a constant overflows in the forward pass, and not in FP32's."""
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
    """The fields of an Investigation that say where a step departs from FP32.

    That is the first op whose result is far from FP32's, and further than rounded weights alone make it; or where the
    error begins that a later op enlarges, as in a long sum: so many times further that no layers add up to it. Where an
    op takes other elements than in FP32, by indices or a mask, it is the op whose rounding decides which.

    Gradients are held against each other at a loss scale of 1.
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
        is_many = by_rounding is not None and one.sample.numel() >= FEW_VALUES  # of one value it may be none by luck
        limit = max(several_roundings, BEYOND_NOISE * (by_rounding or 0.0))
        departs = is_far or (is_many and distance is not None and distance > limit)
        is_weightless = noise is not None and noise.taken == own.taken  # rounded weights alone lead to no other choice
        if (one.taken != own.taken and (departs or is_weightless)) or (departs and one.picked != own.picked):
            found = _decider(key, lowered, reference)
            return {"first_far": _far(lowered[found], reference[found]), "choice": _far(one, own)}
        if departs:
            return {"first_far": _far(one, own)}
    return {}


def rounded_angles(low: Replayed, fp32: Replayed, angular: Collection[OpKey]) -> tuple[Producer, ...]:
    """Those of these sines and cosines whose result is far from FP32's, the furthest first. Of angles that are whole
    numbers, and held exactly, none is."""
    reference, lowered = _by_place(fp32), _by_place(low)
    both = ((one, reference[key]) for key, one in lowered.items() if key[0] in angular and key in reference)
    far = (_far(one, own) for one, own in both if (_relative(one, own) or 0.0) > WRONG_ANGLES)
    return tuple(sorted(far, key=lambda found: -(found.distance or 0.0)))


def _decider(choice: OpRun, lowered: Mapping[OpRun, Sampled], reference: Mapping[OpRun, Sampled]) -> OpRun:
    """The first op of the same call of a module whose result is not FP32's and decides what is taken; else the op that
    takes it."""
    runs, taking = list(lowered), lowered[choice]
    met, left = {choice}, set(taking.choosers or taking.makers)
    while left:
        run = runs[left.pop()]
        one, own = lowered[run], reference.get(run)
        is_equal = own is not None and one.picked == own.picked and torch.equal(one.sample, own.sample)
        if run not in met and one.seen.place[:3] == taking.seen.place[:3] and not is_equal:
            met.add(run)
            left |= one.makers
    # A cast to half is FP32's too, or is none of it: what it is for is named.
    computed = [run for run in runs if run in met & reference.keys() and lowered[run].seen.output.size]
    return next(run for run in computed if base_name(lowered[run].seen.op) not in CASTS)


def _far(one: Sampled, fp32: Sampled) -> Producer:
    return replace(_producer(one.seen, None, Circumstances()), distance=_relative(one, fp32))


class _Makers:
    """The ops of a replay by the magnitude that they have made: each op's largest input is one of those.

    ``met`` is what FP32 has for each op. A cast only hands on what it is given, and autocast's are none of FP32's: the
    way back leads through it.
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
        """The first op, on the way to the one at ``index``, whose values are far larger than FP32's own.

        The way back leads from each op to the latest one before it that made its largest input.
        """
        found, largest, phase = None, self._ops[index].inputs.largest, self._ops[index].place.phase
        while earlier := bisect_left(made := self._made.get((largest, phase), ()), index):
            index = made[earlier - 1]
            seen = self._ops[index]
            fp32, is_finite = self._met.get(seen.key, UNMET)
            is_cast, at = base_name(seen.op) in CASTS, scale if phase == "backward" else 1.0
            if not is_cast and (not fp32 or not is_finite or largest < DEPARTURE * fp32 * at):
                break
            found, largest = found if is_cast else seen, seen.inputs.largest
        return found


def _by_place(replayed: Replayed) -> dict[OpRun, Sampled]:
    """The ops of a trace, in its order, by key and which of that key's runs it is; gradients at a loss scale of 1."""
    assert isinstance(replayed.trace, SampleTrace)
    runs, found = Counter[OpKey](), dict[OpRun, Sampled]()
    for one in replayed.trace.sampled:
        key, is_gradient = one.seen.key, one.seen.place.phase == "backward"
        found[key, runs[key]] = replace(one, sample=one.sample / replayed.replay.scale) if is_gradient else one
        runs[key] += 1
    return found


def _relative(one: Sampled, fp32: Sampled) -> float | None:
    """The norm of the difference over that of the reference; None where they cannot be compared."""
    sample, reference = one.sample, fp32.sample
    if sample.shape != reference.shape:
        return None
    # What is infinite in both is meant to be, and so is a mask of each dtype's lowest number, with scores added; a
    # sample of zeros alone says nothing about sizes.
    are_masked = (sample <= -NEARLY_LOWEST) & (reference <= -NEARLY_LOWEST)
    same = (sample == reference) | are_masked
    norm = float(reference[~same].norm()) if bool((~same).any()) else 0.0
    difference = float((sample - reference)[~same].norm())
    return difference / norm if 0 < norm < math.inf and math.isfinite(difference) else None


def _distance(low: Mapping[str, torch.Tensor], fp32: Mapping[str, torch.Tensor]) -> float | None:
    """The norm of the difference over that of FP32's; equal gradients are no distance apart, zeros too."""
    difference = total = 0.0
    for name, reference in fp32.items():
        total += float(reference.double().square().sum())
        other = low.get(name)
        difference += float((reference.double() - (0.0 if other is None else other.double())).square().sum())
    if fp32 and difference == 0.0:
        return 0.0
    return math.sqrt(difference / total) if 0 < total < math.inf and math.isfinite(difference) else None


def _flushed(low: torch.Tensor | None, fp32: torch.Tensor) -> float:
    """The sum of squares of FP32's gradient where the low one is exactly zero."""
    squares = fp32.double().square()
    return float(squares.sum() if low is None else squares[low == 0].sum())


def _is_noise(name: str, fp32: Replayed, floor: Replayed | None) -> bool:
    """A gradient is nothing but rounding: other roundings give quite another one."""
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
