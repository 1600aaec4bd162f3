"""What one pass of a step takes, whatever it runs on: the memory behind its tensors, and its FLOPs by dtype."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

from ampdbg.ops import CASTS, base_name
from ampdbg.precision.half_kernels import FUSED_ATTENTION
from ampdbg.probes.module_calls import run_eagerly
from ampdbg.replay.copies import duplicate
from ampdbg.replay.run import NamedLosses, run_pass
from ampdbg.workload.build import Workload

_ON_CPU = zip(FUSED_ATTENTION.split(), FUSED_ATTENTION.replace("_for_cpu", "").split(), strict=True)

FORMULAS: Mapping[Any, Any] = flop_registry | {
    getattr(torch.ops.aten, ours): flop_registry[getattr(torch.ops.aten, theirs)] for ours, theirs in _ON_CPU
}
"""torch's own counts by op, and those of its fused attention for a CPU's too."""


@dataclass(frozen=True)
class PassUse:
    """What forward and backward of one micro-batch take.

    ``casts`` and ``activations`` are bytes that autograd keeps between the two, weights left out: copies of weights in
    another dtype, as autocast makes them, and all else. ``flops`` are those of matrix products, convolutions and
    attention by the dtype of their operands; recurrent layers have none, as torch has no formula for them.
    """

    activations: int
    casts: int
    flops: Mapping[str, int]


def use_of_a_pass(workload: Workload, batch: Any, forward: Callable[[], AbstractContextManager[Any]]) -> PassUse:
    """Runs forward and backward once, at a loss scale of 1; gradients and buffers change as in any pass.

    Where CUDA is emulated the tensors are those that a GPU keeps, in their dtypes: the kernels that widen half
    operands stand below autograd. What is a fused kernel on a GPU alone may keep less there.

    Args:
        workload: what makes losses of the batch.
        batch: on the device; it is copied, for it may be a slice of a data set, and a step may write into it.
        forward: makes the context of the forward pass.

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
        # Between the passes: what belongs to a lost part of the graph, is gone too; and what a backward
        # pass casts again, as a checkpoint does, may lie where an activation lay.
        alive = (held.tensor for reference in packed if (held := reference()) is not None)
        for at, size in _memory(alive).items():
            if at not in weights:
                (casts if at in ops.casts else activations)[at] = size

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor)
    with run_eagerly(), _Ops(weights) as ops, hooks:
        run_pass(workload, [duplicate(batch)], forward, seen=count)
    return PassUse(sum(activations.values()), sum(casts.values()), ops.flops)


class _Packed:
    """What autograd holds instead of a tensor: it goes when autograd lets it go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Else the result of an op that keeps it would hold its own graph, also where nothing else does.
        self.tensor = tensor.detach()


class FlopCount(TorchDispatchMode):
    """Counts the FLOPs of what runs, by what ``kind`` says of an op's first tensor."""

    def __init__(self, kind: Callable[[torch.Tensor], str]) -> None:
        super().__init__()
        self._kind = kind
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(op, "overloadpacket", op))
        if formula is not None:
            operand = next((value for value in args if isinstance(value, torch.Tensor)), out)
            with contextlib.suppress(Exception):  # of operands that a formula does not know, such as nested ones
                self.flops[self._kind(operand)] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


class _Ops(FlopCount):
    """Counts FLOPs, and holds the copies of weights in another dtype, so that nothing else comes to lie there."""

    def __init__(self, weights: Mapping[int, int]) -> None:
        super().__init__(lambda operand: str(operand.dtype)[6:])
        self._weights = weights
        self.casts: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(op, types, args, kwargs)
        if base_name(str(op)) in CASTS and _memory(args[:1]).keys() & self._weights:
            self.casts.update(dict.fromkeys(_memory([out]), out))
        return out


def bytes_of(tensors: Iterable[Any]) -> int:
    """The memory behind tensors, each piece once; what else is among them takes none."""
    return sum(_memory(tensors).values())


def _memory(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by storage. One that is on the meta device, as that of a fake tensor, takes none."""
    parts = (part for tensor in tensors if isinstance(tensor, torch.Tensor) for part in _strided(tensor))
    storages = (part.untyped_storage() for part in parts)
    return {storage._cdata: storage.nbytes() for storage in storages if storage.device.type != "meta"}


def _strided(tensor: Any) -> Iterator[torch.Tensor]:
    """What holds the numbers: the tensor itself, or the parts of a sparse one, or of one that wraps others."""
    if is_traceable_wrapper_subclass(tensor):
        held = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from (part for one in held if isinstance(one, torch.Tensor) for part in _strided(one))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided:
        yield tensor
