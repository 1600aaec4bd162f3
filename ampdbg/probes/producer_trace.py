"""A trace that also records why an op could produce inf or NaN: a constant beyond FP16, a division by zero, the batch.

A producer is an op with finite inputs and an output that is not finite. The trace follows by storage where the values
of an op come from: the code, the weights, or the batch. It also follows where inf and NaN go: nowhere, into a NaN, or
into the gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ampdbg.formats import FLOAT16
from ampdbg.ops import (
    ANGULAR,
    ATEN_MOVES,
    CASTS,
    CODE_CONSTANTS,
    FILLS,
    POLES,
    POLES_ELSEWHERE,
    SATURATES,
    SCALINGS,
    SOFTMAXES,
    base_name,
)
from ampdbg.probes.module_calls import ModulePaths
from ampdbg.probes.op_trace import KnownMagnitudes, OpKey, OpPlace, OpSeen, OpTrace, OpTraits, storage_of
from ampdbg.probes.tensors import HALVES, NOTHING, Magnitude, float_values, may_be_bad, together
from ampdbg.record.run import OpSite, Producer

BEYOND_COMPUTING = 1e30
"""No model computes values this large. Masks have them: the lowest number of a format wider than float16."""

FAR_APART = 0.5
"""Radians. If a format's numbers are this far apart, an angle may be off by a quarter of a radian."""

SAMPLE = 64
"""Compare about this many elements of an op's output between two replays, instead of all elements."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances of a producer; see the fields of ``record.Producer``."""

    is_constant: bool = False
    divides_by_zero: bool = False
    leaf: str | None = None
    made_half: tuple[OpSite, ...] = ()


NamedTensors = Sequence[tuple[str, torch.Tensor]]


class ProducerTrace(OpTrace):
    """Records every op, and the circumstances of producers by their index in ``ops``; ``bad`` follows their inf and
    NaN.

    ``data`` is the data of the step. A producer that only moves or casts a tensor in it gets the tensor's name.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths, data: NamedTensors = ()) -> None:
        super().__init__(model, paths)
        self.circumstances: dict[int, Circumstances] = {}
        self.bad = BadValues(self.known)
        self.angular: set[OpKey] = set()
        """The sines and cosines of angles in half precision, now or earlier, that are too large for its spacing."""
        self._spacings: dict[int, float] = {}
        self.given_bad: int | None = None
        """The index of the first op that reads inf or NaN from outside the step. Its output is not finite."""
        self._made: set[int] = set()
        self._origins = Origins(model, data)
        self._given: Sequence[torch.Tensor] = ()
        self._numbers: Sequence[float] = ()

    @property
    def harmless(self) -> set[int]:
        """The producers with infinities that only saturating ops read; FP32's own values would give the same result."""
        unused = ((index, self.ops[index]) for index in self.bad.saturated)
        return {index for index, op in unused if op.place.phase == "forward" and base_name(op.op) not in POLES}

    def before(self, traits: OpTraits, given: Sequence[torch.Tensor], numbers: Sequence[float]) -> Magnitude:
        """Return the magnitude of all inputs, and keep the inputs until :meth:`after` in case the op is a producer."""
        self._given, self._numbers = given, numbers
        self.bad.before(given)
        self._origins.before(base_name(traits.name), given, numbers, lambda tensor: self.known.of(tensor).largest)
        if base_name(traits.name) in CODE_CONSTANTS and given[0].dtype is torch.float16:
            return NOTHING  # the input is already infinite if the code wrote a number beyond half
        return super().before(traits, given, numbers)

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Magnitude, made: Sequence[torch.Tensor]
    ) -> None:
        self.bad.after(
            len(self.ops), base_name(traits.name), before, made[:1] if traits.has_auxiliary_outputs else made
        )
        super().after(traits, place, parameter, before, made)
        self._origins.after(base_name(traits.name), self._given, made)
        self._note_angles((place, traits.name), before.largest, made)
        self._made.update(map(storage_of, made))
        self._given = ()

    def _note_angles(self, key: OpKey, largest: float, made: Sequence[torch.Tensor]) -> None:
        """Follow half values through casts and moves up to a sine or cosine. The relative spacing of a wide format's
        numbers counts as 0."""
        kept = [self._spacings.get(storage_of(tensor), 0.0) for tensor in self._given if tensor.dtype not in HALVES]
        own = [torch.finfo(tensor.dtype).eps for tensor in self._given if tensor.dtype in HALVES]
        spacing = max([*kept, *own], default=0.0)
        place, name = key[0], base_name(key[1])
        if name in ANGULAR and place.phase == "forward" and spacing * largest >= FAR_APART:
            self.angular.add(key)
        for tensor in made:
            self._spacings[storage_of(tensor)] = spacing if name in ATEN_MOVES else 0.0

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        self.bad.added_to_a_gradient(given)

    def noted(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> None:
        if seen.produces:
            name = base_name(seen.op)
            makers = self.makers.of_gradient(seen.op, seen.place, made)
            self.circumstances[len(self.ops) - 1] = Circumstances(
                is_constant=self._is_constant(name, seen, made),
                divides_by_zero=name in POLES and bool(self._given) and self._is_at_a_pole(seen.op),
                leaf=self._origins.leaf(self._given[0]) if name in CASTS and self._given else None,
                made_half=tuple(place.site(op) for place, op in makers.items()),
            )
        elif not seen.output.is_finite and self.given_bad is None:
            numbers = [] if base_name(seen.op) in FILLS else list(map(torch.tensor, self._numbers))
            outside = [tensor for tensor in self._given if storage_of(tensor) not in self._made]
            self.given_bad = len(self.ops) - 1 if any(map(may_be_bad, (*numbers, *outside))) else None

    def _is_at_a_pole(self, op: str) -> bool:
        """True if the op is infinite at an input: a zero divisor, or a zero base with a negative exponent."""
        if base_name(op) != "pow":
            poles = POLES_ELSEWHERE.get(base_name(op), (0.0,))
            return any(bool((self._given[-1] == pole).any()) for pole in poles)
        values = [*self._numbers, *self._given] if op.endswith(".Scalar") else [*self._given, *self._numbers]
        if len(values) < 2:  # a complex exponent
            return False
        base, exponent = map(torch.as_tensor, values)
        return bool(((base == 0) & (exponent < 0)).any())

    def _is_constant(self, name: str, seen: OpSeen, made: Sequence[torch.Tensor]) -> bool:
        if self.is_inner_backward:
            return False  # a gradient starts with one value that is not a mask
        if name in CASTS:
            return self._casts_a_constant()
        if name in CODE_CONSTANTS:
            return True
        beyond = [number for number in self._numbers if abs(number) >= FLOAT16.overflow_threshold]
        if name in SCALINGS and beyond:
            # (1 - mask) * -1e9 is a mask; activations * 1e5 are a product that overflows.
            return any(_is_one_value_times(self._given, number) for number in beyond)
        if name not in SCALINGS:  # zero-dimensional and not a weight, as torch.tensor(-1e9)
            single = [one for one in self._given if one.dim() == 0 and not self._origins.is_of_weights(one)]
            largest = [self.known.of(one).largest for one in single]
            beyond += [number for number in largest if number >= FLOAT16.overflow_threshold]
        return bool(beyond) or self._goes_below_the_lowest(seen, made)

    def _casts_a_constant(self) -> bool:
        """True if all values beyond FP16 are one repeated negative constant, or larger than any computed value.

        Computed values can repeat too, such as activations of the token that begins every sample. So a repeated value
        that depends on the weights must also be written in the code.
        """
        values = float_values(self._given[0]) if self._given else None
        if values is None:
            return False
        beyond = values[values.abs() >= FLOAT16.overflow_threshold]
        low, high = (float(end) for end in torch.aminmax(beyond)) if beyond.numel() else (0.0, 0.0)
        is_repeated = low == high < 0 and beyond.numel() > 1
        is_computed = self._origins.is_of_weights(self._given[0]) and not self._origins.is_written(low)
        return max(abs(low), abs(high)) > BEYOND_COMPUTING or (is_repeated and not is_computed)

    def _goes_below_the_lowest(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> bool:
        """True if a mask of FP16's lowest number overflows. A value that was clamped to that number is not a mask."""
        if seen.inputs.largest != FLOAT16.largest or not self._origins.is_written(FLOAT16.largest):
            return False
        values = [found for found in map(float_values, made) if found is not None]
        return not any(bool((found == torch.inf).any() | found.isnan().any()) for found in values)


NONE: frozenset[int] = frozenset()


class BadValues:
    """Follows inf and NaN through a trace by the storage that holds them; ops are known by their index in the trace.

    ``poisonous`` are producers of infinities from which an op has computed NaN. ``divisors`` are producers of
    infinities by which an op has divided; the quotients are zero. ``in_gradients`` are the ops where inf or NaN in a
    parameter's gradient starts. Forward ops count too: a backward pass reads saved tensors, even if the forward pass
    masks them.
    """

    def __init__(self, known: KnownMagnitudes) -> None:
        self.poisonous: set[int] = set()
        self.divisors: set[int] = set()
        self.in_gradients: set[int] = set()
        self._known = known
        self._causes: dict[int, frozenset[int]] = {}
        self._given: Sequence[torch.Tensor] = ()
        self._read: Sequence[frozenset[int]] = ()
        self._infinite: Sequence[frozenset[int]] = ()
        self._saturated: set[int] = set()
        self._used: set[int] = set()

    @property
    def saturated(self) -> set[int]:
        """The producers with infinities that only saturating ops read, with the same result as for any large number."""
        return self._saturated - self._used - self.in_gradients

    def before(self, given: Sequence[torch.Tensor]) -> None:
        """Record the inputs of an op before it runs, because the op may overwrite them."""
        self._given, self._read, self._infinite = given, (), ()
        if self._causes:
            found = [self._still_behind(tensor) for tensor in given]
            self._read = [behind for behind, _ in found]
            self._infinite = [NONE if has_nan else behind for behind, has_nan in found]

    def after(self, index: int, name: str, before: Magnitude, made: Sequence[torch.Tensor]) -> None:
        """Record the outputs of the op that gets this ``index``; ``before`` is the magnitude of its inputs."""
        bad = [tensor for tensor in made if not self._known.of(tensor).is_finite]
        if bad or self._causes:
            self._note_what_becomes_of_infinities(name, is_finite=not bad)
            for tensor in made:
                self._causes.pop(storage_of(tensor), None)
            behind = frozenset({index}) if before.is_finite else NONE.union(*self._read)
            for tensor in bad:
                makes_nan = self._known.of(tensor).nan > 0 and not before.nan
                if makes_nan:  # NaN computed from a NaN shows nothing more
                    self.poisonous |= behind
                starts_here = makes_nan and (not behind or self._is_masked_throughout(name))
                self._causes[storage_of(tensor)] = behind | {index} if starts_here else behind
        self._given = ()

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        for tensor in given if self._causes else ():
            self.in_gradients |= self._still_behind(tensor)[0]

    def _still_behind(self, tensor: torch.Tensor) -> tuple[frozenset[int], bool]:
        """Return the ops that caused the inf and NaN in a tensor, and True if it holds a NaN. A finite tensor in reused
        memory has no such ops: the trace does not see every tensor."""
        behind = self._causes.get(storage_of(tensor), NONE)
        magnitude = self._known.of(tensor) if behind else None
        if magnitude is None or magnitude.is_finite:
            return NONE, False
        return behind, magnitude.nan > 0

    def _note_what_becomes_of_infinities(self, name: str, *, is_finite: bool) -> None:
        read = NONE.union(*self._infinite)
        if name in SATURATES and is_finite:
            self._saturated |= read
        elif name not in ATEN_MOVES or len(read) > 1:
            self._used |= read
        if name in POLES and is_finite and self._infinite:
            self.divisors |= self._infinite[-1]

    def _is_masked_throughout(self, name: str) -> bool:
        """True if a softmax turns rows of -inf into NaN; such rows are masks, no matter where they come from."""
        if name not in SOFTMAXES:
            return False
        values = (found for found in map(float_values, self._given) if found is not None)
        return not any(bool((found == math.inf).any()) for found in values)


class ReplacedProducerTrace(OpTrace):
    """Replaces the inf and NaN of one producer with a finite number as large as its largest finite output."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths, producer: Producer) -> None:
        super().__init__(model, paths)
        self._producer = producer
        self._number = producer.output_largest or 1.0

    def noted(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> None:
        if seen.produces and seen.site == self._producer.site:
            for tensor in filter(torch.is_floating_point, made):
                tensor.nan_to_num_(self._number, self._number, self._number)
                self.known.forget(tensor)


@dataclass(frozen=True, slots=True)
class Sampled:
    """An op with a sample of its output, for comparison with another replay.

    Choices are integer or bool tensors, such as indices or masks; they have fingerprints instead of samples. ``taken``
    has the fingerprints of choices among the inputs, ``picked`` among the outputs. ``makers`` are the indices of the
    ops that made the inputs; ``choosers`` made the choices among the inputs.
    """

    seen: OpSeen
    sample: torch.Tensor
    taken: tuple[int, ...]
    makers: frozenset[int]
    choosers: frozenset[int]
    picked: tuple[int, ...]


class SampleTrace(OpTrace):
    """Records every op with a sample of its output, even if the output has no floating-point values."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.sampled: list[Sampled] = []
        self._made_by: dict[int, int] = {}
        self._taken: tuple[int, ...] = ()
        self._makers, self._choosers = frozenset[int](), frozenset[int]()

    def before(self, traits: OpTraits, given: Sequence[torch.Tensor], numbers: Sequence[float]) -> Magnitude:
        """Return the magnitude of all inputs together, and record the ops that made the inputs."""
        choices = [one for one in given if _is_choice(one)]
        self._taken, self._makers, self._choosers = _fingerprints(choices), self._of(given), self._of(choices)
        return super().before(traits, given, numbers)

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Magnitude, made: Sequence[torch.Tensor]
    ) -> None:
        super().after(traits, place, parameter, before, made)
        seen = OpSeen(traits.name, place, before, together(map(self.known.of, made)), parameter)
        picked = _fingerprints(filter(_is_choice, made))
        self._made_by |= dict.fromkeys(map(storage_of, made), len(self.sampled))
        self.sampled.append(Sampled(seen, _sample(made), self._taken, self._makers, self._choosers, picked))

    def _of(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        return frozenset(self._made_by[key] for key in map(storage_of, tensors) if key in self._made_by)


WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _is_choice(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.dtype in WHOLE


def _fingerprints(choices: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return one number for each tensor. If any element changes, the number changes too, except by rare chance."""
    flat = (one.reshape(-1).long() for one in choices)
    return tuple(int((one * torch.arange(1, one.numel() + 1, device=one.device)).sum()) for one in flat)


def _sample(made: Sequence[torch.Tensor]) -> torch.Tensor:
    values = next((found for found in map(float_values, made) if found is not None), None)
    if values is None:
        return torch.empty(0)
    flat = values.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLE)
    return flat[:: step - (step % 2 == 0)].double().cpu()  # with an even step all elements may come from one channel


def _is_one_value_times(given: Sequence[torch.Tensor], number: float) -> bool:
    """True if the elements with a product beyond FP16 are one value, repeated."""
    values = float_values(given[0]) if given else None
    if values is None:
        return False
    beyond = values[(values.double() * number).abs() >= FLOAT16.overflow_threshold]
    return beyond.numel() > 1 and bool((beyond == beyond[0]).all())


SAME = 1e-6
"""Relative tolerance for a constant, which is rounded when it is written into a tensor."""


class Origins:
    """Follows the origin of tensors by storage from op to op, through views and casts; keeps no tensor alive.

    A tensor of unknown origin is a mask, or data that the code reads from elsewhere.
    """

    def __init__(self, model: torch.nn.Module, data: NamedTensors = ()) -> None:
        self._of_weights = {key for key in map(storage_of, model.parameters()) if key}
        self._of_batch = {key: name for name, leaf in data if (key := storage_of(leaf))}
        self._constants: set[float] = set()

    def leaf(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the batch leaf if the tensor holds only values of that leaf, else None."""
        return self._of_batch.get(storage_of(tensor))

    def is_of_weights(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._of_weights

    def is_written(self, value: float) -> bool:
        """True if the code has written a constant of this magnitude."""
        return any(math.isclose(abs(value), constant, rel_tol=SAME) for constant in self._constants)

    def before(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        numbers: Sequence[float],
        largest: Callable[[torch.Tensor], float],
    ) -> None:
        """Record the constants among the inputs of an op that are at least FP16's largest number."""
        found = list(map(abs, numbers)) if name in FILLS else []
        found += [largest(tensor) for tensor in given if not self.is_of_weights(tensor)]
        self._constants.update(value for value in found if value >= FLOAT16.largest)

    def after(self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        takes_shape_alone = name.endswith("_like") or name.startswith("new_")
        of_weights = not takes_shape_alone and any(map(self.is_of_weights, given))
        leaf = self._moved(name, given)
        for tensor in made:
            key = storage_of(tensor)
            if not key:
                continue
            is_whole = tensor.nbytes >= tensor.untyped_storage().nbytes()
            if leaf is not None and is_whole:
                self._of_batch[key] = leaf
            else:
                self._of_batch.pop(key, None)
            if of_weights and tensor.is_floating_point():
                self._of_weights.add(key)
            elif is_whole:
                self._of_weights.discard(key)

    def _moved(self, name: str, given: Sequence[torch.Tensor]) -> str | None:
        if name not in ATEN_MOVES or not given:
            return None
        leaves = {self.leaf(tensor) for tensor in given if tensor is given[0] or tensor.is_floating_point()}
        return leaves.pop() if len(leaves) == 1 else None
