"""The cost of a step on any device: memory of its tensors and FLOPs by dtype, or by module."""

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

from ampdbg.errors import AmpdbgError
from ampdbg.ops import CASTS, base_name
from ampdbg.precision.half_kernels import FUSED_ATTENTION
from ampdbg.probes.module_calls import ModulePaths, module_paths, run_eagerly
from ampdbg.probes.op_trace import PlacedOps, RunningOp, placed
from ampdbg.probes.tensors import HALVES, nbytes
from ampdbg.record.pins import OWN, PinCost
from ampdbg.replay.copies import duplicate
from ampdbg.replay.run import NamedLosses, Run, run_pass
from ampdbg.replay.snapshot import FailingStep, Snapshot, rewound
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
    return PassUse(sum(activations.values()), sum(casts.values()), ops.flops)


class _Packed:
    """Replaces a saved tensor in the autograd graph, and is freed with it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without detach, the output of an op that saves its output would keep its own graph alive.
        self.tensor = tensor.detach()


class FlopCount(TorchDispatchMode):
    """Counts FLOPs by the ``kind`` of an op's first tensor."""

    def __init__(self, kind: Callable[[torch.Tensor], str]) -> None:
        super().__init__()
        self._kind = kind
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(op, "overloadpacket", op))
        if formula is not None:
            operand = next((value for value in args if isinstance(value, torch.Tensor)), out)
            with contextlib.suppress(Exception):  # formulas reject some operands, such as nested tensors
                self.flops[self._kind(operand)] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


class _Ops(FlopCount):
    """Counts FLOPs, and keeps casts of weights alive so that no other tensor reuses their memory."""

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


@dataclass(frozen=True)
class StepCosts:
    """The FLOPs and the bytes of half activations of each module's own lines in the forward pass."""

    flops: Mapping[str, int]
    activation_bytes: Mapping[str, int]

    def of(self, atoms: Iterable[str]) -> PinCost:
        """Return the share of these atoms: leaf modules, and other modules' own lines (``NAME:own``)."""
        chosen = {atom.removesuffix(OWN) for atom in atoms}
        flops, size = (sum(each.get(name, 0) for name in chosen) for each in (self.flops, self.activation_bytes))
        return PinCost(
            flops / max(1, sum(self.flops.values())), size / max(1, sum(self.activation_bytes.values())), size
        )


def step_costs(run: Run, failing: FailingStep) -> StepCosts:
    """Run the step's forward pass twice more, to measure half outputs and to count FLOPs."""
    model, snapshot = run.workload.model, failing.snapshot
    with rewound(model, snapshot), placed(model, _HalfOutputs) as outputs, contextlib.suppress(AmpdbgError):
        _run_forward(run, snapshot)
    return StepCosts(_own_flops(run, snapshot), outputs.sizes)


class _HalfOutputs(PlacedOps):
    """Sums the bytes of half outputs of each module's ops."""

    def __init__(self, model: torch.nn.Module, paths: ModulePaths) -> None:
        super().__init__(model, paths)
        self.sizes: Counter[str] = Counter()

    def after(self, op: RunningOp) -> None:
        self.sizes[op.place.module] += sum(nbytes(one) for one in op.results if one.dtype in HALVES)


def _own_flops(run: Run, snapshot: Snapshot) -> dict[str, int]:
    """Return FLOPs by the module whose own lines run, whichever module calls it; empty if an error is raised."""
    model = run.workload.model
    try:
        with (
            rewound(model, snapshot),
            run_eagerly(),
            module_paths(model) as paths,
            FlopCount(lambda operand: paths.current[0]) as counter,
        ):
            _run_forward(run, snapshot)
    except (AmpdbgError, AssertionError, RuntimeError):
        return {}
    return dict(counter.flops)


def _run_forward(run: Run, snapshot: Snapshot) -> None:
    for batch in snapshot.batches:
        with run.mode.forward():
            run.workload.losses(batch)
