"""A trace that also notes why an op could produce inf or NaN: a constant beyond FP16, a division by zero, a batch.

Where an op's values come from is followed by their storage: the code, the weights, or the batch. So is where inf and
NaN go from the op that makes them: into nothing, into a NaN, or into the gradients of parameters."""

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
    FILLS,
    POLES,
    POLES_ELSEWHERE,
    SATURATES,
    SCALINGS,
    SOFTMAXES,
    WRITTEN_OUT,
    base_name,
)
from ampdbg.probes.module_calls import ModulePaths
from ampdbg.probes.op_trace import KnownMagnitudes, OpKey, OpPlace, OpSeen, OpTrace, OpTraits, storage_of
from ampdbg.probes.tensors import HALVES, NOTHING, Magnitude, float_values, may_be_bad, together
from ampdbg.record.run import OpSite, Producer

BEYOND_COMPUTING = 1e30
"""Nothing that a model computes is as large: it is the lowest number of a wider format, as a mask."""

FAR_APART = 0.5
"""Radians: angles whose format has no nearer numbers may be off by a quarter of a radian."""

SAMPLE = 64
"""So many elements of an op's output stand for all of them when two replays are compared."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What surrounds an op that produces inf or NaN; see the fields of ``record.Producer``."""

    is_constant: bool = False
    divides_by_zero: bool = False
    leaf: str | None = None
    made_half: tuple[OpSite, ...] = ()


NamedTensors = Sequence[tuple[str, torch.Tensor]]


class ProducerTrace(OpTrace):
    """Notes every op, and the circumstances of the producers by their place in ``ops``.

    ``data`` is that of the step: a producer that only moves or casts values of a tensor in it has its name. ``bad``
    knows where the inf and NaN of each have gone.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths, data: NamedTensors = ()) -> None:
        super().__init__(model, paths)
        self.circumstances: dict[int, Circumstances] = {}
        self.bad = BadValues(self.known)
        self.angular: set[OpKey] = set()
        """The ops of angles that are in half, or were, so large that the numbers of that are far apart."""
        self._spacings: dict[int, float] = {}
        self.given_bad: int | None = None
        """The first op that makes inf or NaN of what it is given from outside of the step."""
        self._made: set[int] = set()
        self._origins = Origins(model, data)
        self._given: Sequence[torch.Tensor] = ()
        self._numbers: Sequence[float] = ()

    @property
    def harmless(self) -> set[int]:
        """The producers whose infinities nothing reads but what makes of them what it makes of FP32's own values."""
        unused = ((index, self.ops[index]) for index in self.bad.saturated)
        return {index for index, op in unused if op.place.phase == "forward" and base_name(op.op) not in POLES}

    def before(self, traits: OpTraits, given: Sequence[torch.Tensor], numbers: Sequence[float]) -> Magnitude:
        """The magnitude of all inputs; they are looked at once more if the op produces."""
        self._given, self._numbers = given, numbers
        self.bad.before(given)
        self._origins.before(base_name(traits.name), given, numbers, lambda tensor: self.known.of(tensor).largest)
        if base_name(traits.name) in WRITTEN_OUT and given[0].dtype is torch.float16:
            return NOTHING  # what it is given is infinite where the number that was written is beyond half
        return super().before(traits, given, numbers)

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Magnitude, made: Sequence[torch.Tensor]
    ) -> None:
        """Notes the op."""
        self.bad.after(len(self.ops), base_name(traits.name), before, made[:1] if traits.keeps_the_rest else made)
        super().after(traits, place, parameter, before, made)
        self._origins.after(base_name(traits.name), self._given, made)
        self._note_angles((place, traits.name), before.largest, made)
        self._made.update(map(storage_of, made))
        self._given = ()

    def _note_angles(self, key: OpKey, largest: float, made: Sequence[torch.Tensor]) -> None:
        """Follows what is half through casts and moves, up to a sine or cosine of it."""
        spacing = max((self._spacing_of(tensor) for tensor in self._given), default=0.0)
        place, name = key[0], base_name(key[1])
        if name in ANGULAR and place.phase == "forward" and spacing * largest >= FAR_APART:
            self.angular.add(key)
        for tensor in made:
            self._spacings[storage_of(tensor)] = spacing if name in ATEN_MOVES else 0.0

    def _spacing_of(self, tensor: torch.Tensor) -> float:
        """How far apart the numbers are that a tensor can hold, as a share of their size; 0 of a wide one."""
        own = torch.finfo(tensor.dtype).eps if tensor.dtype in HALVES else 0.0
        return own or self._spacings.get(storage_of(tensor), 0.0)

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        """Notes where the inf and NaN start that are added to the gradient of a parameter."""
        self.bad.added_to_a_gradient(given)

    def noted(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> None:
        """Notes the circumstances of a producer."""
        if seen.produces:
            self.circumstances[len(self.ops) - 1] = self._circumstances(seen, made)
        elif not seen.output.is_finite and self.given_bad is None:
            numbers = [] if base_name(seen.op) in FILLS else list(map(torch.tensor, self._numbers))
            outside = [tensor for tensor in self._given if storage_of(tensor) not in self._made]
            self.given_bad = len(self.ops) - 1 if any(map(may_be_bad, (*numbers, *outside))) else None

    def _circumstances(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> Circumstances:
        name = base_name(seen.op)
        makers = self.makers.of_gradient(seen.op, seen.place, made)
        return Circumstances(
            is_constant=self._is_constant(name, seen, made),
            divides_by_zero=name in POLES and bool(self._given) and self._is_at_a_pole(seen.op),
            leaf=self._origins.leaf(self._given[0]) if name in CASTS and self._given else None,
            made_half=tuple(place.site(op) for place, op in makers.items()),
        )

    def _is_at_a_pole(self, op: str) -> bool:
        """What it is given is infinite there, as a divisor of zero: for a power the base, where the exponent is
        negative."""
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
            return False  # what a gradient begins with is one value, and no mask
        if name in CASTS:
            return self._casts_a_constant()
        if name in WRITTEN_OUT:
            return True
        beyond = [number for number in self._numbers if abs(number) >= FLOAT16.overflow_threshold]
        if name in SCALINGS and beyond:
            # (1 - mask) * -1e9 is a mask; activations * 1e5 are a product that overflows.
            return any(_is_one_value_times(self._given, number) for number in beyond)
        if name not in SCALINGS:  # a tensor of no dimensions that is no weight, as torch.tensor(-1e9)
            single = [one for one in self._given if one.dim() == 0 and not self._origins.is_of_weights(one)]
            largest = [self.known.of(one).largest for one in single]
            beyond += [number for number in largest if number >= FLOAT16.overflow_threshold]
        return bool(beyond) or self._goes_below_the_lowest(seen, made)

    def _casts_a_constant(self) -> bool:
        """What is beyond FP16 is one negative constant several times, or beyond anything that is computed.

        What a model computes can repeat as well: the activations of a token that begins every sample. It is a
        constant only where the code has written it.
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
        """A mask of FP16's lowest number goes below it; a value that was clamped to that number is no mask."""
        if seen.inputs.largest != FLOAT16.largest or not self._origins.is_written(FLOAT16.largest):
            return False
        values = [found for found in map(float_values, made) if found is not None]
        return not any(bool((found == torch.inf).any() | found.isnan().any()) for found in values)


NONE: frozenset[int] = frozenset()


class BadValues:
    """Follows the inf and NaN of a trace by the storage that holds them; ops are known by their place in it.

    ``poisonous`` are the producers whose infinities an op has made a NaN of, ``divisors`` those by whose it has
    divided: to zeros. ``in_gradients`` are the ops where what was added to a parameter's gradient starts, in the
    forward pass too: a backward pass takes what that has kept, whatever masks it there.
    """

    def __init__(self, known: KnownMagnitudes) -> None:
        self.poisonous: set[int] = set()
        self.divisors: set[int] = set()
        self.in_gradients: set[int] = set()
        self._known = known
        self._behind: dict[int, frozenset[int]] = {}
        self._given: Sequence[torch.Tensor] = ()
        self._read: Sequence[frozenset[int]] = ()
        self._infinite: Sequence[frozenset[int]] = ()
        self._saturated: set[int] = set()
        self._used: set[int] = set()

    @property
    def saturated(self) -> set[int]:
        """The producers whose infinities nothing reads but what makes of them what it makes of any large number."""
        return self._saturated - self._used - self.in_gradients

    def before(self, given: Sequence[torch.Tensor]) -> None:
        """To be called before an op runs, which may write into what it is given."""
        self._given, self._read, self._infinite = given, (), ()
        if self._behind:
            found = [self._still_behind(tensor) for tensor in given]
            self._read = [behind for behind, _ in found]
            self._infinite = [NONE if has_nan else behind for behind, has_nan in found]

    def after(self, index: int, name: str, before: Magnitude, made: Sequence[torch.Tensor]) -> None:
        """To be called with what the op has made: it will be ``index``, ``before`` is the magnitude of its inputs."""
        bad = [tensor for tensor in made if not self._known.of(tensor).is_finite]
        if bad or self._behind:
            self._note_what_becomes_of_infinities(name, made, bad)
            self._follow(index, name, before, made, bad)
        self._given = ()

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        """To be called with what is added to the gradient of a parameter."""
        for tensor in given if self._behind else ():
            self.in_gradients |= self._still_behind(tensor)[0]

    def _still_behind(self, tensor: torch.Tensor) -> tuple[frozenset[int], bool]:
        """The ops behind the inf and NaN that a tensor holds, and whether it holds a NaN; none where its memory was
        another's: not every tensor is seen."""
        behind = self._behind.get(storage_of(tensor), NONE)
        magnitude = self._known.of(tensor) if behind else None
        if magnitude is None or magnitude.is_finite:
            return NONE, False
        return behind, magnitude.nan > 0

    def _note_what_becomes_of_infinities(
        self, name: str, made: Sequence[torch.Tensor], bad: Sequence[torch.Tensor]
    ) -> None:
        read = NONE.union(*self._infinite)
        if name in SATURATES and not bad:
            self._saturated |= read
        elif name not in ATEN_MOVES or len(read) > 1:
            self._used |= read
        if name in POLES and not bad and self._infinite:
            self.divisors |= self._infinite[-1]

    def _follow(
        self, index: int, name: str, before: Magnitude, made: Sequence[torch.Tensor], bad: Sequence[torch.Tensor]
    ) -> None:
        for tensor in made:
            self._behind.pop(storage_of(tensor), None)
        behind = frozenset({index}) if before.is_finite else NONE.union(*self._read)
        for tensor in bad:
            makes_nan = self._known.of(tensor).nan > 0 and not before.nan
            if makes_nan:  # what comes of a NaN in its turn says nothing more
                self.poisonous |= behind
            starts_here = makes_nan and (not behind or self._is_masked_throughout(name))
            self._behind[storage_of(tensor)] = behind | {index} if starts_here else behind

    def _is_masked_throughout(self, name: str) -> bool:
        """A softmax makes NaN of rows of -inf, which are meant as a mask wherever they come from."""
        if name not in SOFTMAXES:
            return False
        values = (found for found in map(float_values, self._given) if found is not None)
        return not any(bool((found == math.inf).any()) for found in values)


class Mended(OpTrace):
    """Puts a finite number, as large as what else the op makes, in the place of the inf and NaN of one producer."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths, producer: Producer) -> None:
        super().__init__(model, paths)
        self._producer = producer
        self._number = producer.output_largest or 1.0

    def noted(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> None:
        """Mends what the op has made, where it is that producer."""
        if seen.produces and seen.site == self._producer.site:
            for tensor in filter(torch.is_floating_point, made):
                tensor.nan_to_num_(self._number, self._number, self._number)
                self.known.forget(tensor)


@dataclass(frozen=True, slots=True)
class Sampled:
    """An op with a sample of its output, to be held against another replay's; of whole numbers and masks fingerprints.

    ``taken`` and ``picked`` are the fingerprints of those among its inputs and outputs. ``makers`` are the places, in
    the trace, of the ops that its inputs come from, ``choosers`` those of what it takes elements by.
    """

    seen: OpSeen
    sample: torch.Tensor
    taken: tuple[int, ...]
    makers: frozenset[int]
    choosers: frozenset[int]
    picked: tuple[int, ...]


class SampleTrace(OpTrace):
    """Notes every op, those that make no floating-point values too, with a sample of its output."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.sampled: list[Sampled] = []
        self._made_by: dict[int, int] = {}
        self._taken: tuple[int, ...] = ()
        self._makers, self._choosers = frozenset[int](), frozenset[int]()

    def before(self, traits: OpTraits, given: Sequence[torch.Tensor], numbers: Sequence[float]) -> Magnitude:
        """The magnitude of all inputs together; notes where they come from."""
        choices = [one for one in given if _is_choice(one)]
        self._taken, self._makers, self._choosers = _fingerprints(choices), self._of(given), self._of(choices)
        return super().before(traits, given, numbers)

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Magnitude, made: Sequence[torch.Tensor]
    ) -> None:
        """Notes the op and the sample."""
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
    """Of each a number that is another one, but for a rare chance, where any element is."""
    flat = (one.reshape(-1).long() for one in choices)
    return tuple(int((one * torch.arange(1, one.numel() + 1, device=one.device)).sum()) for one in flat)


def _sample(made: Sequence[torch.Tensor]) -> torch.Tensor:
    values = next((found for found in map(float_values, made) if found is not None), None)
    if values is None:
        return torch.empty(0)
    flat = values.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLE)
    return flat[:: step - (step % 2 == 0)].double().cpu()  # of an even one all may be of one channel


def _is_one_value_times(given: Sequence[torch.Tensor], number: float) -> bool:
    """One value, several times, is all that a product with ``number`` carries beyond FP16."""
    values = float_values(given[0]) if given else None
    if values is None:
        return False
    beyond = values[(values.double() * number).abs() >= FLOAT16.overflow_threshold]
    return beyond.numel() > 1 and bool((beyond == beyond[0]).all())


SAME = 1e-6
"""A constant is rounded when it is written into a tensor."""


class Origins:
    """Follows tensors by their storage from op to op, through views and casts; keeps none of them.

    What is not known to come from the weights or the batch comes from neither: a mask, or what the code reads
    from elsewhere.
    """

    def __init__(self, model: torch.nn.Module, data: NamedTensors = ()) -> None:
        self._of_weights = {key for key in map(storage_of, model.parameters()) if key}
        self._of_batch = {key: name for name, leaf in data if (key := storage_of(leaf))}
        self._constants: set[float] = set()

    def leaf(self, tensor: torch.Tensor) -> str | None:
        """The name of the batch's leaf whose values the tensor holds, and no others; None where there is none."""
        return self._of_batch.get(storage_of(tensor))

    def is_of_weights(self, tensor: torch.Tensor) -> bool:
        """Weights took part in it: what a model computes."""
        return storage_of(tensor) in self._of_weights

    def is_written(self, value: float) -> bool:
        """The code has written this magnitude somewhere as a constant."""
        return any(math.isclose(abs(value), constant, rel_tol=SAME) for constant in self._constants)

    def before(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        numbers: Sequence[float],
        largest: Callable[[torch.Tensor], float],
    ) -> None:
        """Notes the constants that an op is given, as large as FP16 can hold or larger."""
        found = [abs(number) for number in numbers] if name in FILLS else []
        found += [largest(tensor) for tensor in given if not self.is_of_weights(tensor)]
        self._constants.update(value for value in found if value >= FLOAT16.largest)

    def after(self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Notes where the values come from that an op has made of ``given``."""
        of_weights = not _is_like(name) and any(map(self.is_of_weights, given))
        leaf = self._moved(name, given)
        for tensor in made:
            key = storage_of(tensor)
            if not key:
                continue
            is_whole = _fills_its_storage(tensor)
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


def _is_like(name: str) -> bool:
    """An op takes no more than shape and dtype from the tensor it is given."""
    return name.endswith("_like") or name.startswith("new_")


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes >= tensor.untyped_storage().nbytes()
