"""The cost of a step on any device: memory of its tensors and FLOPs by dtype, or by module."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

from ampdbg.errors import AmpdbgError
from ampdbg.ops import CASTS, base_name
from ampdbg.precision.half_kernels import FUSED_ATTENTION
from ampdbg.probes.module_calls import ModulePaths, run_eagerly
from ampdbg.probes.op_trace import PlacedOps, RunningOp, placed
from ampdbg.probes.tensors import HALVES, nbytes
from ampdbg.record.pins import OWN, PinCost, is_pinned
from ampdbg.replay.copies import duplicate
from ampdbg.replay.run import NamedLosses, Run, run_pass
from ampdbg.replay.snapshot import FailingStep, rewound
from ampdbg.workload.build import Workload

_ON_CPU = zip(FUSED_ATTENTION.split(), FUSED_ATTENTION.replace("_for_cpu", "").split(), strict=True)

FORMULAS: Mapping[Any, Any] = flop_registry | {
    getattr(torch.ops.aten, ours): flop_registry[getattr(torch.ops.aten, theirs)] for ours, theirs in _ON_CPU
}
"""torch's FLOP formulas by op, also used for its fused CPU attention."""


@dataclass(frozen=True)
class PassUse:
    """The cost of the forward and backward pass of one micro-batch.

    ``casts`` and ``activations`` are the bytes that autograd saves between the passes, without the weights. ``casts``
    are autocast's copies of weights in another dtype. ``flops`` counts matrix products, convolutions and attention by
    operand dtype. torch has no formula for recurrent layers.
    """

    activations: int
    casts: int
    flops: Mapping[str, int]


def use_of_a_pass(workload: Workload, batch: Any, forward: Callable[[], AbstractContextManager[Any]]) -> PassUse:
    """Run the forward and backward pass once at a loss scale of 1; gradients and buffers change as usual.

    With an emulated CUDA, autograd saves the tensors and dtypes of a GPU, since half operands are widened below
    autograd. An op that is fused only on a GPU may save less there.

    Args:
        workload: computes losses from the batch.
        batch: a batch on the device; copied, since it may be a slice of a data set that the step writes into.
        forward: returns the context manager of the forward pass.

    Raises: as :func:`~ampdbg.replay.run.run_pass`.
    """
    weights = _memory((*workload.model.parameters(), *workload.model.buffers()))
    packed: list[weakref.ref[_Packed]] = []
    activations: dict[int, int] = {}
    casts: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> _Packed:
        packed.append(weakref.ref(held := _Packed(tensor)))
        return held

    def count(losses: NamedLosses, share: float) -> None:
        # Count between the passes. Lost parts of the graph are already freed. Casts repeated in the backward pass, as
        # in a checkpoint, may reuse an activation's memory.
        alive = (held.tensor for reference in packed if (held := reference()) is not None)
        for at, size in _memory(alive).items():
            if at not in weights:
                (casts if at in ops.casts else activations)[at] = size

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor)
    with run_eagerly(), _Ops(weights) as ops, hooks:
        run_pass(workload, [duplicate(batch)], forward, seen=count)
    return PassUse(sum(activations.values()), sum(casts.values()), +ops.flops)


class _Packed:
    """Replaces a saved tensor in the autograd graph, and is freed with it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without detach, the output of an op that saves its output would keep its own graph alive.
        self.tensor = tensor.detach()


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of an op that has run, or 0 for one that torch has no formula for."""
    with contextlib.suppress(Exception):  # a formula rejects some operands, such as nested tensors
        return int(FORMULAS[getattr(op, "overloadpacket", op)](*args, **(kwargs or {}), out_val=out))
    return 0


class _Ops(TorchDispatchMode):
    """Counts FLOPs by the dtype of an op's first tensor. Keeps casts of weights alive, so that no other tensor reuses
    their memory."""

    def __init__(self, weights: Mapping[int, int]) -> None:
        super().__init__()
        self._weights = weights
        self.flops: Counter[str] = Counter()
        self.casts: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        operand = next((value for value in args if isinstance(value, torch.Tensor)), out)
        self.flops[str(getattr(operand, "dtype", ""))[6:]] += flops_of(op, args, kwargs, out)
        if base_name(str(op)) in CASTS and _memory(args[:1]).keys() & self._weights:
            self.casts.update(dict.fromkeys(_memory([out]), out))
        return out


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of all tensors among the values, counting shared storage once."""
    return sum(_memory(tensors).values())


def _memory(tensors: Iterable[Any]) -> dict[int, int]:
    """Return bytes by storage, without meta tensors such as fake tensors, which use no memory."""
    parts = (part for tensor in tensors if isinstance(tensor, torch.Tensor) for part in _strided(tensor))
    storages = (part.untyped_storage() for part in parts)
    return {storage._cdata: storage.nbytes() for storage in storages if storage.device.type != "meta"}


def _strided(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that hold the data: the tensor itself, or the parts of a sparse or wrapper tensor."""
    if is_traceable_wrapper_subclass(tensor):
        held = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from (part for one in held if isinstance(one, torch.Tensor) for part in _strided(one))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided:
        yield tensor


# By module

PlaceOfCode = tuple[str, tuple[str, int]]
"""The module whose own lines run, and the file and line there, or the line that calls a library."""


@dataclass(frozen=True)
class StepCosts:
    """The FLOPs by place, and the bytes of half activations of each module's own lines, in the forward pass."""

    flops: Mapping[PlaceOfCode, int]
    activation_bytes: Mapping[str, int]

    def of(self, atoms: Iterable[str]) -> PinCost:
        """Return the share of these atoms: leaf modules, and other modules' own lines (``NAME:own``)."""
        chosen = {atom.removesuffix(OWN) for atom in atoms}
        size = sum(self.activation_bytes.get(name, 0) for name in chosen)
        flops = sum(count for (name, _), count in self.flops.items() if name in chosen)
        return PinCost(_share(flops, sum(self.flops.values())), _share(size, sum(self.activation_bytes.values())), size)

    def share_of_flops(self, pins: Collection[str], lines: Collection[tuple[str, int]]) -> float:
        """Return the share (0 to 1) of what these lines compute in modules that the pins cover."""
        there = (count for (name, line), count in self.flops.items() if line in lines and is_pinned(name, pins))
        return _share(sum(there), sum(self.flops.values()))


def step_costs(run: Run, failing: FailingStep) -> StepCosts:
    """Run the step's forward pass once more, to measure half outputs and to count FLOPs."""
    model, snapshot = run.workload.model, failing.snapshot
    with rewound(model, snapshot), placed(model, OwnCosts) as costs, contextlib.suppress(AmpdbgError):
        for batch in snapshot.batches:
            with run.mode.forward():
                run.workload.losses(batch)
    return StepCosts(costs.flops, costs.sizes)


class OwnCosts(PlacedOps):
    """Sums the FLOPs by place, and the bytes of half outputs by module."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.flops: Counter[PlaceOfCode] = Counter()
        self.sizes: Counter[str] = Counter()
        self._flops = 0

    def run(self, op: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        out = super().run(op, args, kwargs, written)
        self._flops = flops_of(op, args, kwargs, out)
        return out

    def after(self, op: RunningOp) -> None:
        line = getattr(op.place.line, "caller", op.place.line) or ("", 0)
        self.flops[op.place.module, line[:2]] += self._flops
        self.sizes[op.place.module] += sum(nbytes(one) for one in op.results if one.dtype in HALVES)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
