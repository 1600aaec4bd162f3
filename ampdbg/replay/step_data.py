"""Finds out if inf or NaN in the data of a step makes the step fail. The data is its batch with the targets.

NaN that the script masks, such as in padded targets, does no harm. It does not explain a NaN loss with another cause.
So the step is replayed with finite data. The data is to blame only if FP32 is then finite.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from ampdbg.agreement import is_finite
from ampdbg.probes.tensors import bad_data, float_values, may_be_bad
from ampdbg.record.run import TensorCounts
from ampdbg.replay.copies import altered_batch
from ampdbg.replay.replay import FP32, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot
from ampdbg.replay.step import RecordedStep


def blamed_data(run: Run, snapshot: Snapshot, played: RecordedStep) -> tuple[TensorCounts, ...]:
    """Return the data with inf or NaN that makes the step fail in FP32.

    Args:
        run: the workload; it must still have the weights of the step.
        snapshot: the step, with the arguments of its calls as batches.
        played: the calls of the step.
    """
    suspects = [
        (name, tensor)
        for name, tensor in played.data_in(played.given)
        if may_be_bad(tensor) and not tensor.requires_grad and tensor.numel() > 1  # a single number is not a sample
    ]
    has_loss = played.reach == "whole"  # else the outputs of its modules may include a mask of -inf

    def comes_through(kept: Collection[int] = ()) -> bool:
        finite = {id(tensor): _made_finite(tensor) for _, tensor in suspects if id(tensor) not in kept}
        batches = [altered_batch(batch, lambda tensor: finite.get(id(tensor), tensor)) for batch in snapshot.batches]
        again = replay_step(run, replace(snapshot, batches=tuple(batches)), FP32).replay
        return is_finite(again) or not (has_loss or again.error or math.isnan(again.loss))

    if not suspects or not comes_through():
        return ()
    alone = [one for one in suspects if len(suspects) == 1 or not comes_through({id(one[1])})]
    return tuple(bad_data(alone or suspects))


@torch.no_grad()
def _made_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the mean of its finite values, or 1, instead of inf and NaN: a number of usual size."""
    values = float_values(tensor)
    finite = values[values.isfinite()] if values is not None else torch.empty(0)
    usual = float(finite.double().mean()) if finite.numel() else 1.0
    return torch.nan_to_num(tensor.detach(), usual, usual, usual).requires_grad_(tensor.requires_grad)
