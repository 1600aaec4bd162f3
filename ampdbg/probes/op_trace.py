"""Every ATen op of a step, forward and backward, with its module, source line and magnitudes.

A backward op belongs to the forward line that made its autograd node. The two are joined by the node's
sequence number: a node is made just before its op is dispatched, so in the forward pass the newest number
is the op's own, and in the backward pass the running node tells its number.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch._C import _should_allow_numbers_as_tensors as takes_numbers
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.ops import ALLOCATES, ATEN_PRODUCTS, CASTS, KEEPS_THE_REST, OVERWRITES, base_name
from ampdbg.probes.module_calls import OUTSIDE, ModulePaths, module_paths, run_eagerly
from ampdbg.probes.seams import Seam, attached, only_follows
from ampdbg.probes.source_lines import innermost_line, source_if_known
from ampdbg.probes.tensors import (
    HALVES,
    Magnitude,
    magnitude_of,
    magnitude_of_number,
    tensors_in,
    times_written,
    together,
)
from ampdbg.record.run import OpSite
from ampdbg.source.ownership import Line


@dataclass(frozen=True, slots=True)
class OpTraits:
    """``written`` and ``numeric`` are argument names with their positions: tensors that the op writes into, and
    arguments whose plain numbers are values and not sizes or dimensions. ``allocates`` says that what it
    returns is memory as it was found, ``overwrites`` that it does not read what it writes over, ``keeps_the_rest``
    that only the first of what it returns is its result. ``is_number`` says that it gives no tensor. ``strict`` are the
    positions of tensors for which it takes no number."""

    name: str
    is_view: bool
    allocates: bool
    overwrites: bool
    keeps_the_rest: bool
    is_number: bool
    written: tuple[tuple[int, str], ...]
    numeric: tuple[tuple[int, str], ...]
    strict: tuple[int, ...]


_TAKES_A_VALUE = ("number", "Tensor", "Optional[number]", "Optional[Tensor]", "float", "Optional[float]")


@functools.cache
def traits_of(op: Any) -> OpTraits:
    """The traits of an op overload, looked up once."""
    arguments = list(enumerate(op._schema.arguments))
    base_name = op._schema.name.rpartition("::")[2]
    return OpTraits(
        name=str(op),
        # _unsafe_view only promises that nobody else looks at what it views; what lift_fresh returns is no view of
        # anything but a tensor that the user's code wrote out.
        is_view=base_name == "_unsafe_view" or (op.is_view and base_name != "lift_fresh"),
        allocates=base_name in ALLOCATES,
        overwrites=base_name in OVERWRITES or any(a.is_out for _, a in arguments),
        keeps_the_rest=base_name in KEEPS_THE_REST,
        is_number=not any("Tensor" in str(returned.type) for returned in op._schema.returns),
        written=tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        numeric=tuple((i, a.name) for i, a in arguments if str(a.type) in _TAKES_A_VALUE),
        strict=() if takes_numbers(base_name) else tuple(i for i, a in arguments if str(a.type) == "Tensor"),
    )


def numbers_in(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float]:
    """The plain numbers that were given as values."""
    values = (_argument(position, name, args, kwargs) for position, name in traits.numeric)
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def as_it_takes_them(traits: OpTraits, args: Sequence[Any]) -> Sequence[Any]:
    """What an op is given, with tensors in the place of numbers that it does not take: torch hands a dispatch mode the
    number where TorchScript has made a tensor of one."""
    numbers = [i for i in traits.strict if i < len(args) and type(args[i]) in _WHOLE]
    if not numbers:  # nearly always
        return args
    return [torch.tensor(value, dtype=_WHOLE[type(value)]) if i in numbers else value for i, value in enumerate(args)]


_WHOLE = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def written_by(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the op writes into."""
    return tensors_in([_argument(position, name, args, kwargs) for position, name in traits.written])


def _argument(position: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


_next_sequence_number = torch._C._autograd._get_sequence_nr

OpPhase = Literal["forward", "backward"]
Trace = TypeVar("Trace", bound="PlacedOps")


class OpPlace(NamedTuple):
    """Where an op stands: its phase, module, call of the module, and source line (None where none is known).

    A forward pass that a checkpoint computes again is ``forward`` too, and the same call. So is the pass of
    ``autograd.grad``, as for a gradient penalty: the loss is made of what it gives, and the loss scale is not in it.
    """

    phase: OpPhase
    module: str
    call: int
    line: Line | None

    def site(self, op: str) -> OpSite:
        """Where an op is in the step, as a record has it."""
        return self.phase, self.module, self.call, op, source_if_known(self.line)


OpKey = tuple[OpPlace, str]


@dataclass(frozen=True, slots=True)
class OpSeen:
    """One op as it ran. ``op`` is torch's name (``aten.mm.default``); ``parameter`` is set where a gradient
    is accumulated into one. A number given to the op counts among its inputs."""

    op: str
    place: OpPlace
    inputs: Magnitude
    output: Magnitude
    parameter: str = ""

    @property
    def key(self) -> OpKey:
        """What it has in common with the same op of another replay: its place and name; the dtype may differ."""
        return self.place, self.op

    @property
    def site(self) -> OpSite:
        """Where it is in the step, as a record has it."""
        return self.place.site(self.op)

    @property
    def produces(self) -> bool:
        """Inf or NaN starts here: finite inputs, an output that is not."""
        return self.inputs.is_finite and not self.output.is_finite

    @property
    def makes_nan(self) -> bool:
        """NaN starts here, be it of infinities."""
        return self.output.nan > 0 and not self.inputs.nan


class PlacedOps(TorchDispatchMode):
    """A dispatch mode that finds the place of every op; what is looked at there is a subclass's to say.

    Views compute nothing and are left out, and so is memory that is only allocated: its values are accidental.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__()
        self.known = KnownMagnitudes()
        self.makers = HalfMakers()
        self._places = _Places(model, paths)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch is to keep its compiler from the method below: nothing is compiled while a trace is entered,
        and at every op that costs as much as a small op."""
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op and looks at it."""
        kwargs = kwargs or {}
        if only_follows():
            return op(*args, **kwargs)
        traits = traits_of(op)
        args = as_it_takes_them(traits, args)
        given = tensors_in((*args, *kwargs.values()) if kwargs else args)
        place, parameter = self._places.of_op(given)
        if parameter:
            self.added_to_a_gradient(given)
        if traits.is_view:
            return op(*args, **kwargs)
        written = written_by(traits, args, kwargs) if traits.written else []
        if traits.overwrites:
            given = [tensor for tensor in given if not any(tensor is target for target in written)]
        # Looked at before the op runs: it may write into one of them.
        before = self.before(traits, given, numbers_in(traits, args, kwargs))
        output = self.run(op, args, kwargs, written)
        made = tensors_in(output) or written
        for tensor in (*written, *made):
            self.known.forget(tensor)
        self.makers.after(traits.name, place, given, made)
        if not traits.allocates and any(tensor.numel() for tensor in made):
            self.after(traits, place, parameter, before, made)
        return output

    @property
    def is_inner_backward(self) -> bool:
        """``autograd.grad`` runs, outside of the pass of the loss."""
        return self._places.is_inner_backward

    def around(self, seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function of torch's; ``autograd.grad`` adds to no parameter, so that what it gives is used again."""
        is_grad = seam == "engine" and not kwargs.get("accumulate_grad", True)
        starts = is_grad and torch._C._current_graph_task_id() == -1
        self._places.is_inner_backward |= starts
        try:
            return original(*args, **kwargs)
        finally:
            self._places.is_inner_backward &= not starts

    def run(self, op: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """Runs one op, which writes into ``written``."""
        return op(*args, **kwargs)

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        """Looks at what becomes a part of the gradient of a parameter, or all of it: then by a view."""

    def before(self, traits: OpTraits, given: Sequence[torch.Tensor], numbers: Sequence[float]) -> Any:
        """What is to be known of an op's inputs; no tensor is to be kept."""

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Any, made: Sequence[torch.Tensor]
    ) -> None:
        """Looks at what the op has made; ``before`` is what :meth:`before` returned."""


class OpTrace(PlacedOps):
    """Notes every op with the magnitudes of its inputs and outputs; made by :func:`placed`."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.ops: list[OpSeen] = []

    def before(self, traits: OpTraits, given: Sequence[torch.Tensor], numbers: Sequence[float]) -> Magnitude:
        """The magnitude of all inputs together."""
        return together([*map(self.known.of, given), *map(magnitude_of_number, numbers)])

    def after(
        self, traits: OpTraits, place: OpPlace, parameter: str, before: Magnitude, made: Sequence[torch.Tensor]
    ) -> None:
        """Notes the op, unless its outputs hold no floating-point values."""
        output = together(map(self.known.of, made[:1] if traits.keeps_the_rest else made))
        if output.size:
            self.ops.append(OpSeen(traits.name, place, before, output, parameter))
            self.noted(self.ops[-1], made)

    def noted(self, seen: OpSeen, made: Sequence[torch.Tensor]) -> None:
        """Looks at what the op that was noted last has made."""

    @cached_property
    def met(self) -> Mapping[OpKey, tuple[float, bool]]:
        """For each op its largest magnitude, and whether all its outputs were finite; for a trace that has ended: the
        same one in FP32 is what every trial of a search is held against."""
        met: dict[OpKey, tuple[float, bool]] = {}
        for seen in self.ops:
            largest, finite = met.get(seen.key, (0.0, True))
            met[seen.key] = max(largest, seen.output.largest), finite and seen.output.is_finite
        return met


@contextlib.contextmanager
def placed(model: torch.nn.Module, kind: Callable[[torch.nn.Module, ModulePaths], Trace]) -> Iterator[Trace]:
    """Enters a kind of trace for as long as this is entered.

    Compiled code runs eagerly meanwhile, since only eager ops can be seen.
    """
    with run_eagerly(), module_paths(model) as paths, kind(model, paths) as trace, attached(trace.around):
        yield trace


class _Places:
    """Finds the place of each op from the running module, the Python stack and the running autograd node."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        self.is_inner_backward = False
        self._paths = paths
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._by_node: dict[int, OpPlace] = {}
        self._newest: int = _next_sequence_number() - 1
        self._last = OpPlace("forward", *OUTSIDE, None)

    def of_op(self, given: Sequence[torch.Tensor]) -> tuple[OpPlace, str]:
        """The place of the op that is about to run on ``given``, and the parameter that it adds a gradient to."""
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()  # None outside a backward pass
        parameter, line = "", innermost_line()
        # Of what a backward pass runs, only a forward pass that is computed again has gradients of its own.
        if node is None or (line is not None and torch.is_grad_enabled()):
            place = OpPlace("forward", *self._paths.current, line)
        else:
            parameter = self._parameters.get(id(getattr(node, "variable", None)), "")
            place = self._of_backward_op(node, parameter, line)
            place = place._replace(phase="forward") if self.is_inner_backward else place
        self._claim_new_nodes(place, given)
        return place, parameter

    def _of_backward_op(self, node: Any, parameter: str, own_line: Line | None) -> OpPlace:
        made_by = self._by_node.get(node._sequence_nr())
        if made_by is None:
            return OpPlace("backward", parameter.rpartition(".")[0], 0, own_line)
        return OpPlace("backward", made_by.module, made_by.call, own_line or made_by.line)

    def _claim_new_nodes(self, place: OpPlace, given: Sequence[torch.Tensor]) -> None:
        """Notes whose nodes were made since the last op.

        The newest is this op's own if it can have one; without gradients it is the custom Function's whose
        forward runs. What came before it was made after the last op: in-place writes into views do that.
        """
        newest = _next_sequence_number() - 1
        if newest > self._newest:
            has_own = not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in given)
            for number in range(self._newest + 1, newest):
                self._by_node[number] = self._last
            self._by_node[newest] = place if has_own else self._last
            self._newest = newest
        self._last = place


class HalfMakers:
    """Knows by which ops the half tensors were made that ops in FP32 read: their gradients are cast back to half there,
    which no pin of the reading op changes.

    A product and a cast make half. Any other op is only in the dtype that it is given: in half because of the one of
    its makers that ran last, for with that in FP32 it is in FP32 too.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, OpPlace, str]] = {}
        self._read: dict[OpPlace, dict[OpPlace, str]] = {}
        self._ran = 0

    def after(self, name: str, place: OpPlace, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """To be called with what an op has made of what it was given."""
        if place.phase == "backward":
            return
        self._ran += 1
        keys = [storage_of(tensor) for tensor in given if tensor.dtype in HALVES and tensor.requires_grad]
        makers = [self._last[key] for key in keys if key in self._last]
        last = (self._ran, place, name)
        if base_name(name) not in ATEN_PRODUCTS:
            last = max(makers, default=last)
        half = [tensor for tensor in made if tensor.dtype in HALVES]
        for tensor in made:
            self._last.pop(storage_of(tensor), None)
        self._last |= {key: last for key in map(storage_of, half) if key}
        if not half:
            self._read.setdefault(place, {}).update((maker, op) for _, maker, op in makers)

    def of_gradient(self, name: str, place: OpPlace, made: Sequence[torch.Tensor]) -> Mapping[OpPlace, str]:
        """The ops, and their names, that made half what a gradient is cast back to half for; none of any other op."""
        if place.phase == "forward" or base_name(name) not in CASTS or made[0].dtype not in HALVES:
            return {}
        return self._read.get(place._replace(phase="forward"), {})


class KnownMagnitudes:
    """Magnitudes by storage, so that a tensor which several ops read is looked at once.

    Every op passes the trace, so an address that is given to a new tensor is always refreshed first.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, dict[tuple[Any, ...], Magnitude]] = {}

    def of(self, tensor: torch.Tensor) -> Magnitude:
        """The magnitude of a tensor as it is now."""
        storage = storage_of(tensor)
        if not storage:
            return magnitude_of(tensor)
        # Whatever the order of its elements, a view of all of them has the same magnitude.
        times = times_written(tensor)  # more often than the trace has seen, where another's memory stands there by now
        view = tensor.storage_offset(), tensor.numel(), tensor.dtype, _extent(tensor), times
        views = self._by_storage.setdefault(storage, {})
        if view not in views:
            views[view] = magnitude_of(tensor)
        return views[view]

    def forget(self, tensor: torch.Tensor) -> None:
        """To be called when a tensor was made or written."""
        self._by_storage.pop(storage_of(tensor), None)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none of its own, as a masked, a sparse or a fake one."""
    if isinstance(tensor, FakeTensor):  # of which torch warns, in the place of an error
        return 0
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    except RuntimeError:
        return 0


def _extent(tensor: torch.Tensor) -> int:
    """How far the tensor reaches into its storage: views of equal count and extent hold the same elements
    unless they skip differently, which strides of one extent and count do not for permutations of a block."""
    if tensor.is_contiguous():
        return tensor.numel() - 1
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
