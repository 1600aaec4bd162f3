"""What autograd keeps, counted once more by hooks that do nothing else."""

from __future__ import annotations

import torch

from ampdbg.costs.step import PassUse, use_of_a_pass
from ampdbg.replay.run import Run
from ampdbg.training.loop import batches_of_steps


def used(run: Run) -> PassUse:
    return use_of_a_pass(run.workload, next(batches_of_steps(run))[0], run.mode.forward)


def counted(run: Run) -> int:
    """The same by hooks that only count: every storage that autograd keeps, but for those of the model."""
    model, kept = run.workload.model, dict[int, torch.UntypedStorage]()
    batch = [leaf.clone() for leaf in next(batches_of_steps(run))[0]]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with run.mode.forward(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = run.workload.losses(batch)
    for weight in (*model.parameters(), *model.buffers()):
        kept.pop(weight.untyped_storage().data_ptr(), None)
    assert losses
    return sum(storage.nbytes() for storage in kept.values())
