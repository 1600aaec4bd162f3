"""A trace that also records why an op could produce inf or NaN: a constant beyond FP16, a division by zero, the batch.

A producer is an op with finite inputs and an output that is not finite. The trace follows by storage where the values
of an op come from: the code, the weights, or the batch. It also follows where inf and NaN go: nowhere, into a NaN, or
into the gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
from ampdbg.probes.op_trace import OpKey, OpSeen, OpTrace, RunningOp, storage_of
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

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the values in a storage come from. A storage of unknown origin is a mask, or data that the code reads from
    elsewhere.

    Attributes:
        causes: The ops, by their index in the trace, where inf and NaN among the values start.
        leaf: The name of the batch leaf, if the storage holds only values of that leaf.
        is_of_weights: True if the values depend on the weights.
        rounded_to: The coarsest half dtype from which the values were moved or cast; float64 for none.
        is_made: True if an op of the step has written the values.
    """

    causes: frozenset[int] = NONE
    leaf: str | None = None
    is_of_weights: bool = False
    rounded_to: torch.dtype = torch.float64
    is_made: bool = False


UNKNOWN = Origin()

SAME = 1e-6
"""Relative tolerance for a constant, which is rounded when it is written into a tensor."""


class ProducerTrace(OpTrace):
    """Records every op, and the circumstances of producers by their index in ``ops``. It follows the origins of values
    by storage, through views and casts, and keeps no tensor alive.

    ``data`` is the data of the step. A producer that only moves or casts a tensor in it gets the tensor's name.

    ``poisonous`` are producers of infinities from which an op has computed NaN. ``divisors`` are producers of
    infinities by which an op has divided; the quotients are zero. ``in_gradients`` are the ops where inf or NaN in a
    parameter's gradient starts. Forward ops count too: a backward pass reads saved tensors, even if the forward pass
    masks them.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths, data: NamedTensors = ()) -> None:
        super().__init__(model, paths)
        self.circumstances: dict[int, Circumstances] = {}
        self.poisonous: set[int] = set()
        self.divisors: set[int] = set()
        self.in_gradients: set[int] = set()
        self.angular: dict[OpKey, str] = {}
        """The sines and cosines of angles in half precision, now or earlier, that are too large for its spacing. Each
        has the half format as its value."""
        self.given_bad: int | None = None
        """The index of the first op that reads inf or NaN from outside the step. Its output is not finite."""
        self._origins = {storage_of(leaf): Origin(leaf=name) for name, leaf in data}
        self._origins |= dict.fromkeys(map(storage_of, model.parameters()), Origin(is_of_weights=True))
        self._origins.pop(0, None)
        self._constants: set[float] = set()
        self._inputs: Sequence[tuple[torch.Tensor, Origin]] = ()
        self._infinite: Sequence[frozenset[int]] = ()
        self._saturated: set[int] = set()
        self._used: set[int] = set()

    @property
    def harmless(self) -> set[int]:
        """The producers with infinities that only saturating ops read; FP32's own values would give the same result."""
        unused = ((index, self.ops[index]) for index in self._saturated - self._used - self.in_gradients)
        return {index for index, op in unused if op.place.phase == "forward" and base_name(op.op) not in POLES}

    def before(self, op: RunningOp) -> Magnitude:
        """Return the magnitude of all inputs, and keep the origins of the inputs, which the op may overwrite."""
        self._inputs = [(tensor, self._origin(tensor)) for tensor in op.given]
        self._infinite = [
            NONE if origin.causes and self.known.of(tensor).nan else origin.causes for tensor, origin in self._inputs
        ]
        found = list(map(abs, op.numbers)) if op.traits.base_name in FILLS else []
        found += [self.known.of(tensor).largest for tensor, origin in self._inputs if not origin.is_of_weights]
        self._constants.update(value for value in found if value >= FLOAT16.largest)
        if op.traits.base_name in CODE_CONSTANTS and op.given[0].dtype is torch.float16:
            return NOTHING  # the input is already infinite if the code wrote a number beyond half
        return super().before(op)

    def after(self, op: RunningOp) -> None:
        causes, name = self._causes(op), op.traits.base_name
        super().after(op)
        half, leaf = self._coarsest(), self._leaf(name)
        is_far_apart = torch.finfo(half).eps * op.inputs.largest >= FAR_APART
        if name in ANGULAR and op.place.phase == "forward" and is_far_apart:
            self.angular[op.place, op.traits.name] = str(half).removeprefix("torch.")
        takes_shape_alone = name.endswith("_like") or name.startswith("new_")
        of_weights = not takes_shape_alone and any(origin.is_of_weights for _, origin in self._inputs)
        for tensor in op.made:
            storage = storage_of(tensor)
            is_whole = storage != 0 and tensor.nbytes >= tensor.untyped_storage().nbytes()
            was_of_weights = not is_whole and self._origins.get(storage, UNKNOWN).is_of_weights
            self._origins[storage] = Origin(
                causes=causes.get(storage, NONE),
                leaf=leaf if is_whole else None,
                is_of_weights=was_of_weights or (of_weights and storage != 0 and tensor.is_floating_point()),
                rounded_to=half if name in ATEN_MOVES else UNKNOWN.rounded_to,
                is_made=True,
            )
        self._inputs = ()

    def _origin(self, tensor: torch.Tensor) -> Origin:
        """Return the origin of a tensor's values. A finite tensor in reused memory has no causes: the trace does not
        see every tensor."""
        origin = self._origins.get(storage_of(tensor), UNKNOWN)
        return replace(origin, causes=NONE) if origin.causes and self.known.of(tensor).is_finite else origin

    def _causes(self, op: RunningOp) -> dict[int, frozenset[int]]:
        """Return the ops where the inf and NaN of the outputs start, by storage. Note what became of the infinities
        among the inputs."""
        bad = [tensor for tensor in op.results if not self.known.of(tensor).is_finite]
        self._note_infinities(op.traits.base_name, is_finite=not bad)
        index, read = len(self.ops), NONE.union(*(origin.causes for _, origin in self._inputs))
        behind = frozenset({index}) if op.inputs.is_finite else read
        causes: dict[int, frozenset[int]] = {}
        for tensor in bad:
            makes_nan = self.known.of(tensor).nan > 0 and not op.inputs.nan
            if makes_nan:  # NaN computed from a NaN shows nothing more
                self.poisonous |= behind
            starts_here = makes_nan and (not behind or _is_masked_throughout(op))
            causes[storage_of(tensor)] = behind | {index} if starts_here else behind
        return causes

    def _note_infinities(self, name: str, *, is_finite: bool) -> None:
        read = NONE.union(*self._infinite)
        if name in SATURATES and is_finite:
            self._saturated |= read
        elif name not in ATEN_MOVES or len(read) > 1:
            self._used |= read
        if name in POLES and is_finite and self._infinite:
            self.divisors |= self._infinite[-1]

    def _coarsest(self) -> torch.dtype:
        """Return the coarsest half dtype from which the inputs were moved or cast; float64 for none."""
        known = (one.dtype if one.dtype in HALVES else origin.rounded_to for one, origin in self._inputs)
        return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=UNKNOWN.rounded_to)

    def _leaf(self, name: str) -> str | None:
        """Return the name of the batch leaf if the op only moves or casts values of one leaf, else None."""
        if name not in ATEN_MOVES or not self._inputs:
            return None
        leaves = {of.leaf for one, of in self._inputs if one is self._inputs[0][0] or one.is_floating_point()}
        return leaves.pop() if len(leaves) == 1 else None

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        self.in_gradients |= NONE.union(*(self._origin(tensor).causes for tensor in given))

    def noted(self, seen: OpSeen, op: RunningOp) -> None:
        if seen.produces:
            self.circumstances[len(self.ops) - 1] = Circumstances(
                is_constant=self._is_constant(seen, op),
                divides_by_zero=op.traits.base_name in POLES and bool(op.given) and _is_at_a_pole(op),
                leaf=self._inputs[0][1].leaf if op.traits.base_name in CASTS and self._inputs else None,
                made_half=tuple(place.site(name) for place, name in self.makers.of_gradient(op).items()),
            )
        elif not seen.output.is_finite and self.given_bad is None:
            numbers = [] if op.traits.base_name in FILLS else list(map(torch.tensor, op.numbers))
            outside = [tensor for tensor, origin in self._inputs if not origin.is_made]
            self.given_bad = len(self.ops) - 1 if any(map(may_be_bad, (*numbers, *outside))) else None

    def _is_constant(self, seen: OpSeen, op: RunningOp) -> bool:
        if self.is_inner_backward:
            return False  # a gradient starts with one value that is not a mask
        if op.traits.base_name in CASTS:
            return self._casts_a_constant(op)
        if op.traits.base_name in CODE_CONSTANTS:
            return True
        beyond = [number for number in op.numbers if abs(number) >= FLOAT16.overflow_threshold]
        if op.traits.base_name in SCALINGS and beyond:
            # (1 - mask) * -1e9 is a mask; activations * 1e5 are a product that overflows.
            return any(_is_one_value_times(op.given, number) for number in beyond)
        if op.traits.base_name not in SCALINGS:  # zero-dimensional and not a weight, as torch.tensor(-1e9)
            single = [one for one, origin in self._inputs if one.dim() == 0 and not origin.is_of_weights]
            largest = [self.known.of(one).largest for one in single]
            beyond += [number for number in largest if number >= FLOAT16.overflow_threshold]
        return bool(beyond) or self._goes_below_the_lowest(seen, op)

    def _casts_a_constant(self, op: RunningOp) -> bool:
        """True if all values beyond FP16 are one repeated negative constant, or larger than any computed value.

        Computed values can repeat too, such as activations of the token that begins every sample. So a repeated value
        that depends on the weights must also be written in the code.
        """
        values = float_values(op.given[0]) if op.given else None
        if values is None:
            return False
        beyond = values[values.abs() >= FLOAT16.overflow_threshold]
        low, high = (float(end) for end in torch.aminmax(beyond)) if beyond.numel() else (0.0, 0.0)
        is_repeated = low == high < 0 and beyond.numel() > 1
        is_computed = self._inputs[0][1].is_of_weights and not self._is_written(low)
        return max(abs(low), abs(high)) > BEYOND_COMPUTING or (is_repeated and not is_computed)

    def _goes_below_the_lowest(self, seen: OpSeen, op: RunningOp) -> bool:
        """True if a mask of FP16's lowest number overflows. A value that was clamped to that number is not a mask."""
        if seen.inputs.largest != FLOAT16.largest or not self._is_written(FLOAT16.largest):
            return False
        values = [found for found in map(float_values, op.made) if found is not None]
        return not any(bool((found == torch.inf).any() | found.isnan().any()) for found in values)

    def _is_written(self, value: float) -> bool:
        """True if the code has written a constant of this magnitude."""
        return any(math.isclose(abs(value), constant, rel_tol=SAME) for constant in self._constants)


class ReplacedProducerTrace(OpTrace):
    """Replaces the inf and NaN of one producer with a finite number as large as its largest finite output."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths, producer: Producer) -> None:
        super().__init__(model, paths)
        self._producer = producer
        self._number = producer.output_largest or 1.0

    def noted(self, seen: OpSeen, op: RunningOp) -> None:
        if seen.produces and seen.site == self._producer.site:
            for tensor in filter(torch.is_floating_point, op.made):
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

    def before(self, op: RunningOp) -> Magnitude:
        """Return the magnitude of all inputs together, and record the ops that made the inputs."""
        choices = [one for one in op.given if _is_choice(one)]
        self._taken, self._makers, self._choosers = _fingerprints(choices), self._of(op.given), self._of(choices)
        return super().before(op)

    def after(self, op: RunningOp) -> None:
        super().after(op)
        seen = OpSeen(op.traits.name, op.place, op.inputs, together(map(self.known.of, op.made)), op.parameter)
        picked = _fingerprints(filter(_is_choice, op.made))
        self._made_by |= dict.fromkeys(map(storage_of, op.made), len(self.sampled))
        self.sampled.append(Sampled(seen, _sample(op.made), self._taken, self._makers, self._choosers, picked))

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


def _is_masked_throughout(op: RunningOp) -> bool:
    """True if a softmax turns rows of -inf into NaN; such rows are masks, no matter where they come from."""
    if op.traits.base_name not in SOFTMAXES:
        return False
    values = (found for found in map(float_values, op.given) if found is not None)
    return not any(bool((found == math.inf).any()) for found in values)


def _is_at_a_pole(op: RunningOp) -> bool:
    """True if the op is infinite at an input: a zero divisor, or a zero base with a negative exponent."""
    if op.traits.base_name != "pow":
        poles = POLES_ELSEWHERE.get(op.traits.base_name, (0.0,))
        return any(bool((op.given[-1] == pole).any()) for pole in poles)
    values = [*op.numbers, *op.given] if op.traits.name.endswith(".Scalar") else [*op.given, *op.numbers]
    if len(values) < 2:  # a complex exponent
        return False
    base, exponent = map(torch.as_tensor, values)
    return bool(((base == 0) & (exponent < 0)).any())
