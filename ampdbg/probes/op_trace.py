"""Records every ATen op of a step, forward and backward, with its module, source line and magnitudes.

A backward op belongs to the forward line that created its autograd node: the node's sequence number joins the two. A
node is created just before its op is dispatched. So in the forward pass the newest number is the op's own. In the
backward pass the running node has the number.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch._C import _should_allow_numbers_as_tensors as takes_numbers
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.ops import ALLOCATES, ATEN_PRODUCTS, CASTS, OVERWRITES, RETURNS_SAVED_VALUES, base_name
from ampdbg.probes.module_calls import OUTSIDE, ModulePaths, module_paths, run_eagerly
from ampdbg.probes.seams import Seam, attached, is_tracing
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
    """Properties of an op overload; arguments are pairs of position and name.

    ``written``: tensors that the op writes. ``numeric``: arguments that take plain numbers as values, not as sizes or
    dimensions. ``allocates``: the result is uninitialized memory. ``overwrites``: the op does not read what it writes
    over. ``has_auxiliary_outputs``: only the first output is the result. ``is_number``: no output is a tensor.
    ``strict``: positions of tensor arguments that take no number.
    """

    name: str
    base_name: str
    is_view: bool
    allocates: bool
    overwrites: bool
    has_auxiliary_outputs: bool
    is_number: bool
    written: tuple[tuple[int, str], ...]
    numeric: tuple[tuple[int, str], ...]
    strict: tuple[int, ...]


_TAKES_A_VALUE = ("number", "Tensor", "Optional[number]", "Optional[Tensor]", "float", "Optional[float]")


@functools.cache
def traits_of(op: Any) -> OpTraits:
    """Return the traits of an op overload, from a cache."""
    arguments = list(enumerate(op._schema.arguments))
    own_name = op._schema.name.rpartition("::")[2]
    return OpTraits(
        name=str(op),
        base_name=base_name(str(op)),
        # _unsafe_view is a view too, and promises that nothing else reads its input. lift_fresh only returns a view
        # of a tensor literal, so its output counts as new values.
        is_view=own_name == "_unsafe_view" or (op.is_view and own_name != "lift_fresh"),
        allocates=own_name in ALLOCATES,
        overwrites=own_name in OVERWRITES or any(a.is_out for _, a in arguments),
        has_auxiliary_outputs=own_name in RETURNS_SAVED_VALUES,
        is_number=not any("Tensor" in str(returned.type) for returned in op._schema.returns),
        written=tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        numeric=tuple((i, a.name) for i, a in arguments if str(a.type) in _TAKES_A_VALUE),
        strict=() if takes_numbers(own_name) else tuple(i for i, a in arguments if str(a.type) == "Tensor"),
    )


def with_tensor_arguments(traits: OpTraits, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments, with tensors for numbers that the op does not take. If TorchScript made a tensor from a
    number, torch passes the number to a dispatch mode."""
    numbers = [i for i in traits.strict if i < len(args) and type(args[i]) in _DTYPE_OF_NUMBER]
    if not numbers:  # nearly always
        return args
    return [
        torch.tensor(value, dtype=_DTYPE_OF_NUMBER[type(value)]) if i in numbers else value
        for i, value in enumerate(args)
    ]


_DTYPE_OF_NUMBER = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def written_by(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the op writes."""
    return tensors_in([_argument(position, name, args, kwargs) for position, name in traits.written])


def _argument(position: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


_next_sequence_number = torch._C._autograd._get_sequence_nr

OpPhase = Literal["forward", "backward"]
Trace = TypeVar("Trace", bound="PlacedOps")


class OpPlace(NamedTuple):
    """The place of an op: its phase, module, number of the module's call, and source line (None if unknown).

    A forward pass that a checkpoint recomputes is ``forward`` too, and the same call. So is the pass of
    ``autograd.grad``, as for a gradient penalty: the loss uses its results, and they carry no loss scale.
    """

    phase: OpPhase
    module: str
    call: int
    line: Line | None

    def site(self, op: str) -> OpSite:
        """Return the op's place in the format of a record."""
        return self.phase, self.module, self.call, op, source_if_known(self.line)


OpKey = tuple[OpPlace, str]


@dataclass(frozen=True, slots=True)
class OpSeen:
    """One run of an op. ``op`` is torch's name (``aten.mm.default``). ``parameter`` names the parameter into which the
    op accumulates a gradient. A number passed to the op counts as an input."""

    op: str
    place: OpPlace
    inputs: Magnitude
    output: Magnitude
    parameter: str = ""

    @property
    def key(self) -> OpKey:
        """The place and name, equal for the same op in every replay; its dtype may differ."""
        return self.place, self.op

    @property
    def site(self) -> OpSite:
        return self.place.site(self.op)

    @property
    def produces(self) -> bool:
        """True if inf or NaN starts here: all inputs are finite and an output is not."""
        return self.inputs.is_finite and not self.output.is_finite

    @property
    def makes_nan(self) -> bool:
        """True if NaN starts here; the inputs may hold inf."""
        return self.output.nan > 0 and not self.inputs.nan


@dataclass(slots=True)
class RunningOp:
    """An op under way. It takes the tensors ``given`` and the ``numbers`` as values. It has returned, or else written,
    the tensors ``made``. ``inputs`` is the result of :meth:`PlacedOps.before`."""

    traits: OpTraits
    place: OpPlace
    parameter: str
    given: Sequence[torch.Tensor]
    numbers: Sequence[float]
    inputs: Any = None
    made: Sequence[torch.Tensor] = ()

    @property
    def results(self) -> Sequence[torch.Tensor]:
        """The tensors ``made``, without auxiliary outputs."""
        return self.made[:1] if self.traits.has_auxiliary_outputs else self.made


class PlacedOps(TorchDispatchMode):
    """A dispatch mode that finds the place of every op; subclasses decide what to measure there.

    The place comes from the running module, the Python stack and the running autograd node.

    Views compute nothing and are skipped. So are ops that only allocate memory, which holds arbitrary values.
    """

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__()
        self.known = KnownMagnitudes()
        self.makers = HalfMakers()
        self.is_inner_backward = False
        """True while ``autograd.grad`` runs outside the loss's backward pass."""
        self._paths = paths
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._by_node: dict[int, OpPlace] = {}
        self._newest: int = _next_sequence_number() - 1
        self._last = OpPlace("forward", *OUTSIDE, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not disable its compiler around the method below. Nothing is compiled during
        a trace, and for every op the switch would cost as much as a small op."""
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_tracing():
            return op(*args, **kwargs)
        traits = traits_of(op)
        args = with_tensor_arguments(traits, args)
        given = tensors_in((*args, *kwargs.values()) if kwargs else args)
        place, parameter = self._place_of_op(given)
        if parameter:
            self.added_to_a_gradient(given)
        if traits.is_view:
            return op(*args, **kwargs)
        written = written_by(traits, args, kwargs) if traits.written else []
        if traits.overwrites:
            given = [tensor for tensor in given if not any(tensor is target for target in written)]
        # Measure the inputs first, since the op may write into one.
        values = (_argument(position, name, args, kwargs) for position, name in traits.numeric)
        numbers = [one for one in values if isinstance(one, (int, float)) and not isinstance(one, bool)]
        running = RunningOp(traits, place, parameter, given, numbers)
        running.inputs = self.before(running)
        output = self.run(op, args, kwargs, written)
        running.made = tensors_in(output) or written
        for tensor in (*written, *running.made):
            self.known.forget(tensor)
        self.makers.after(running)
        if not traits.allocates and any(tensor.numel() for tensor in running.made):
            self.after(running)
        return output

    def _place_of_op(self, given: Sequence[torch.Tensor]) -> tuple[OpPlace, str]:
        """Return the place of the op about to run on ``given``, and the parameter whose gradient it accumulates."""
        node: Any = torch._C._current_autograd_node()  # None outside a backward pass
        parameter, line = "", innermost_line()
        # Inside a backward pass, gradients are enabled only in a recomputed forward pass.
        if node is None or (line is not None and torch.is_grad_enabled()):
            place = OpPlace("forward", *self._paths.current, line)
        else:
            parameter = self._parameters.get(id(getattr(node, "variable", None)), "")
            phase: OpPhase = "forward" if self.is_inner_backward else "backward"
            unknown = OpPlace(phase, parameter.rpartition(".")[0], 0, line)
            made_by = self._by_node.get(node._sequence_nr(), unknown)
            place = OpPlace(phase, made_by.module, made_by.call, line or made_by.line)
        self._claim_new_nodes(place, given)
        return place, parameter

    def _claim_new_nodes(self, place: OpPlace, given: Sequence[torch.Tensor]) -> None:
        """Assign the autograd nodes created since the last op to the place of their op.

        The newest node is this op's own if the op can have one. Without gradients it belongs to the custom Function in
        its forward. Older nodes were created after the last op, as by in-place writes into views.
        """
        newest = _next_sequence_number() - 1
        if newest > self._newest:
            has_own = not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in given)
            self._by_node |= dict.fromkeys(range(self._newest + 1, newest), self._last)
            self._by_node[newest] = place if has_own else self._last
            self._newest = newest
        self._last = place

    def around(self, seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a torch function, and note a pass of ``autograd.grad``: it accumulates into no parameter."""
        is_grad = seam == "engine" and not kwargs.get("accumulate_grad", True)
        starts = is_grad and torch._C._current_graph_task_id() == -1
        self.is_inner_backward |= starts
        try:
            return original(*args, **kwargs)
        finally:
            self.is_inner_backward &= not starts

    def run(self, op: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """Run one op, which writes the tensors ``written``."""
        return op(*args, **kwargs)

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        """Examine tensors that become a part of a parameter's gradient, or, by a view op, the whole gradient."""

    def before(self, op: RunningOp) -> Any:
        """Return what :meth:`after` needs to know about the inputs."""

    def after(self, op: RunningOp) -> None:
        """Examine the outputs of the op."""


class OpTrace(PlacedOps):
    """Records every op with the magnitudes of its inputs and outputs; created by :func:`placed`."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.ops: list[OpSeen] = []

    def before(self, op: RunningOp) -> Magnitude:
        return together([*map(self.known.of, op.given), *map(magnitude_of_number, op.numbers)])

    def after(self, op: RunningOp) -> None:
        output = together(map(self.known.of, op.results))
        if output.size:
            self.ops.append(OpSeen(op.traits.name, op.place, op.inputs, output, op.parameter))
            self.noted(self.ops[-1], op)

    def noted(self, seen: OpSeen, op: RunningOp) -> None:
        """Examine the last recorded op, which has run."""

    @cached_property
    def largest_by_op(self) -> Mapping[OpKey, tuple[float, bool]]:
        """Each op's largest magnitude, and True if all its outputs were finite. Read this after the trace has ended: it
        is cached, because every trial of a search is compared with the same FP32 trace."""
        met: dict[OpKey, tuple[float, bool]] = {}
        for seen in self.ops:
            largest, finite = met.get(seen.key, (0.0, True))
            met[seen.key] = max(largest, seen.output.largest), finite and seen.output.is_finite
        return met


@contextlib.contextmanager
def placed(model: torch.nn.Module, kind: Callable[[torch.nn.Module, ModulePaths], Trace]) -> Iterator[Trace]:
    """Trace ops with the given kind of trace inside the ``with`` block.

    Compiled code runs eagerly there, since only eager ops can be traced.
    """
    with run_eagerly(), module_paths(model) as paths, kind(model, paths) as trace, attached(trace.around):
        yield trace


MOST_MAKERS = 8
"""The most places kept as the makers of one half tensor."""


class HalfMakers:
    """Finds the ops that made the half tensors which FP32 ops read. The backward pass casts their gradients back to
    half, and a pin of the FP32 op does not change that.

    Casts and products make half tensors. Any other op keeps the dtype of its inputs: with one of the ops since the last
    product in FP32, all later ones are too. Each of these is a maker, but behind a cast only the cast.
    """

    def __init__(self) -> None:
        self._makers: dict[int, tuple[int, dict[OpPlace, str]]] = {}
        """By storage: when the last cast or product ran, and the makers with their names, the latest first."""
        self._read: dict[OpPlace, dict[OpPlace, str]] = {}
        self._ran = 0

    def after(self, op: RunningOp) -> None:
        """Record the makers of an op's outputs; call this after the op."""
        if op.place.phase == "backward":
            return
        self._ran += 1
        keys = [storage_of(tensor) for tensor in op.given if tensor.dtype in HALVES and tensor.requires_grad]
        made_by = [self._makers[key] for key in keys if key in self._makers]
        half = [tensor for tensor in op.made if tensor.dtype in HALVES]
        if not half:
            self._read.setdefault(op.place, {}).update(item for _, each in made_by for item in each.items())
        made = op.place, op.traits.name
        makers = self._ran, dict([made])
        if made_by and op.traits.base_name not in ATEN_PRODUCTS:
            number, before = max(made_by, key=itemgetter(0))
            *since, first = before.items()
            is_cast = base_name(first[1]) in CASTS
            makers = number, before if is_cast else dict((made, *since[: MOST_MAKERS - 2], first))
        for tensor in op.made:
            self._makers.pop(storage_of(tensor), None)
        self._makers |= {key: makers for key in map(storage_of, half) if key}

    def of_gradient(self, op: RunningOp) -> Mapping[OpPlace, str]:
        """If the op casts a gradient to half, return the ops that made its tensor half, with names; else nothing."""
        if op.place.phase == "forward" or op.traits.base_name not in CASTS or op.made[0].dtype not in HALVES:
            return {}
        return self._read.get(op.place._replace(phase="forward"), {})


class KnownMagnitudes:
    """Magnitudes by storage, so that a tensor which several ops read is measured once.

    Every op passes the trace, so the entry of an address is always dropped before a new tensor uses it.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, dict[tuple[Any, ...], Magnitude]] = {}

    def of(self, tensor: torch.Tensor) -> Magnitude:
        storage = storage_of(tensor)
        if not storage:
            return magnitude_of(tensor)
        # Views of the same elements have the same magnitude, in any order.
        times = times_written(tensor)  # catches writes that the trace did not see, and reused memory
        view = tensor.storage_offset(), tensor.numel(), tensor.dtype, _extent(tensor), times
        views = self._by_storage.setdefault(storage, {})
        if view not in views:
            views[view] = magnitude_of(tensor)
        return views[view]

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the magnitudes of the tensor's storage; call this after the tensor was created or written."""
        self._by_storage.pop(storage_of(tensor), None)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own, as a masked, sparse or fake tensor."""
    if isinstance(tensor, FakeTensor):  # torch would warn instead of raising
        return 0
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    except RuntimeError:
        return 0


def _extent(tensor: torch.Tensor) -> int:
    """Return the offset of the tensor's last element from its first. Views of equal count and extent hold the same
    elements, unless they skip elements differently. Permutations of one block do not skip differently."""
    if tensor.is_contiguous():
        return tensor.numel() - 1
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
