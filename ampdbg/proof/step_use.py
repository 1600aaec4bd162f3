"""What one step takes on this machine: its time, what it keeps for the backward pass, and the GPU's peak memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ampdbg.pinning.costs import as_it_was, seconds_of
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep

View = tuple[int | torch.SymInt, torch.Size, tuple[int, ...]]
"""The offset, shape and strides by which a tensor looks at its memory."""


@dataclass(frozen=True)
class StepUse:
    """One forward and backward pass: its median time in seconds, and bytes.

    ``saved_bytes`` is what autograd keeps for the backward pass of one micro-batch, without the weights
    themselves; ``peak_bytes`` is the most that CUDA's allocator had handed out, None on other devices.
    """

    seconds: float
    saved_bytes: int
    peak_bytes: int | None = None


def step_use(run: Run, failing: FailingStep, *, in_fp32: bool = False) -> StepUse | None:
    """Measures the step as it was, or in FP32; the model must have its weights. None where the step raises."""
    manner = as_it_was(run, failing)
    if in_fp32:
        manner = replace(manner, dtype="float32")
    saved = _saved_bytes(run, failing, manner)
    if saved is None:
        return None
    return StepUse(seconds_of(run, failing, (), manner), saved, _peak_bytes(run, failing, manner))


def _saved_bytes(run: Run, failing: FailingStep, manner: Manner) -> int | None:
    """None where the step raises."""
    model = run.workload.model
    weights = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    views: dict[int, dict[View, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in weights:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            view = (tensor.storage_offset(), tensor.shape, tensor.stride())
            views.setdefault(storage.data_ptr(), {})[view] = tensor.nbytes
        return tensor

    # Of several micro-batches the first: the graph of each is freed before the next, whose memory may be the same.
    snapshot = replace(failing.snapshot, batches=failing.snapshot.batches[:1])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        replayed = replay_step(run, snapshot, manner)
    if replayed.replay.error:
        return None
    # Memory counts once, however many ops keep a view of it; of a data set a batch counts that is a slice of it.
    return sum(min(size, sum(views[storage].values())) for storage, size in storages.items())


def _peak_bytes(run: Run, failing: FailingStep, manner: Manner) -> int | None:
    if run.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(run.device)
    replay_step(run, failing.snapshot, manner)
    return torch.cuda.max_memory_allocated(run.device)
