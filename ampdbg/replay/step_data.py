"""What a step is given from outside, its batch with the targets, and whether inf or NaN in it is why the step fails.

A mask of NaN that the script takes out again, such as padded targets, does no harm, and does not explain a loss that is
NaN for another reason. So the step is run again with finite numbers in the place of those values: only where FP32 comes
through it then are the data to blame.
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
    """What of its data is why FP32 does not come through the step.

    Args:
        run: the workload; its weights must still be those of the step.
        snapshot: the step, with what its calls are given as batches.
        played: its calls.
    """
    suspects = [
        (name, tensor)
        for name, tensor in played.data_in(played.given)
        if may_be_bad(tensor) and not tensor.requires_grad and tensor.numel() > 1  # a single number is no sample
    ]
    has_loss = played.reach == "whole"  # else its modules may give a mask of -inf

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
    """The tensor with the mean of its finite values, or 1, in the place of the others: numbers of the usual size."""
    values = float_values(tensor)
    finite = values[values.isfinite()] if values is not None else torch.empty(0)
    usual = float(finite.double().mean()) if finite.numel() else 1.0
    return torch.nan_to_num(tensor.detach(), usual, usual, usual).requires_grad_(tensor.requires_grad)
