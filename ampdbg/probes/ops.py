"""Every ATen op of a step, forward and backward, with its module, source line and magnitudes.

A backward op belongs to the forward line that made its autograd node. The two are joined by the node's
sequence number: a node is made just before its op is dispatched, so in the forward pass the newest number
is the op's own, and in the backward pass the running node tells its number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.probes.magnitudes import NOTHING, Magnitude, magnitude_of, together
from ampdbg.probes.module_paths import OUTSIDE, ModulePaths, Where, module_paths
from ampdbg.probes.source_lines import Line, innermost_line

_next_sequence_number = torch._C._autograd._get_sequence_nr

OpPhase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op stands: its phase, module, call of the module, and source line (None where none is known)."""

    phase: OpPhase
    module: str
    call: int
    line: Line | None


@dataclass(frozen=True, slots=True)
class OpSeen:
    """One op as it ran. ``op`` is torch's name (``aten.mm.default``); ``parameter`` is set where a gradient
    is accumulated into one. A number given to the op counts among its inputs."""

    op: str
    place: Place
    inputs: Magnitude
    output: Magnitude
    parameter: str = ""

    @property
    def produces(self) -> bool:
        """Whether inf or NaN starts here: finite inputs, an output that is not."""
        return self.inputs.is_finite and not self.output.is_finite


class OpTrace(TorchDispatchMode):
    """A dispatch mode that notes every op; made by :func:`trace_ops`. Views compute nothing and are left out."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__()
        self.ops: list[OpSeen] = []
        self._paths = paths
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._places: dict[int, Place] = {}
        self._known = _KnownMagnitudes()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op and notes it."""
        kwargs = kwargs or {}
        place, parameter = self._place()
        if _is_view(op):
            return op(*args, **kwargs)
        # Looked at before the op runs: it may write into one of them.
        inputs = together(self._known.of(value) for value in _leaves((args, tuple(kwargs.values()))))
        output = op(*args, **kwargs)
        for value in _written(op, args, kwargs):
            self._known.forget(value)
        made = [self._known.refreshed(value) for value in _leaves(output) if isinstance(value, torch.Tensor)]
        if any(magnitude.size for magnitude in made):
            self.ops.append(OpSeen(str(op), place, inputs, together(made), parameter))
        return output

    def _place(self) -> tuple[Place, str]:
        line, in_backward = innermost_line(depth=2)
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()  # None outside a backward pass
        if node is None or (line is not None and self._paths.current != OUTSIDE):
            place = self._make("forward", self._paths.current, line)
            self._places.setdefault(_next_sequence_number() - 1, place)
            return place, ""
        made_by = self._places.get(node._sequence_nr())
        where = (made_by.module, made_by.call) if made_by else OUTSIDE
        own_line = line if in_backward and line is not None else made_by.line if made_by else None
        place = self._make("backward", where, own_line)
        # A node made now belongs to a backward pass of the backward pass.
        self._places.setdefault(_next_sequence_number() - 1, place)
        variable = getattr(node, "variable", None)
        return place, "" if variable is None else self._parameters.get(id(variable), "")

    @staticmethod
    def _make(phase: OpPhase, where: Where, line: Line | None) -> Place:
        return Place(phase, where[0], where[1], line)


@contextlib.contextmanager
def trace_ops(model: torch.nn.Module) -> Iterator[OpTrace]:
    """Notes every op that runs inside, in order; no tensor is kept and nothing is changed."""
    with module_paths(model) as paths, OpTrace(model, paths) as trace:
        yield trace


class _KnownMagnitudes:
    """Magnitudes by storage, so that a tensor which several ops read is looked at once.

    Every op passes the trace, so an address that is given to a new tensor is always refreshed first.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, dict[tuple[Any, ...], Magnitude]] = {}

    def of(self, value: Any) -> Magnitude:
        if isinstance(value, torch.Tensor):
            key = _storage_key(value)
            if key is None:
                return magnitude_of(value)
            views = self._by_storage.setdefault(key[0], {})
            if key[1] not in views:
                views[key[1]] = magnitude_of(value)
            return views[key[1]]
        return _of_number(value) if isinstance(value, float) else NOTHING

    def refreshed(self, tensor: torch.Tensor) -> Magnitude:
        self.forget(tensor)
        return self.of(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        key = _storage_key(tensor)
        if key is not None:
            self._by_storage.pop(key[0], None)


def _of_number(value: float) -> Magnitude:
    if value - value == 0.0:
        return Magnitude(largest=abs(value), size=1)
    is_nan = value != value
    return Magnitude(inf=int(not is_nan), nan=int(is_nan), size=1)


def _storage_key(tensor: torch.Tensor) -> tuple[int, tuple[Any, ...]] | None:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    # Whatever the order of its elements, a view of all of them has the same magnitude.
    return tensor.untyped_storage().data_ptr(), (tensor.storage_offset(), tensor.numel(), tensor.dtype, _extent(tensor))


def _extent(tensor: torch.Tensor) -> int:
    """How far the tensor reaches into its storage: views of equal count and extent hold the same elements
    unless they skip differently, which strides of one extent and count do not for permutations of a block."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


_views: dict[Any, bool] = {}


def _is_view(op: Any) -> bool:
    known = _views.get(op)
    if known is None:
        returns = op._schema.returns
        known = _views[op] = bool(returns) and all(
            item.alias_info is not None and not item.alias_info.is_write for item in returns
        )
    return known


def _written(op: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that the op writes into."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value
