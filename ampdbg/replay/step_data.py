"""What a step is given from outside, its batch with the targets, and whether inf or NaN in it is why the step fails.

A mask of NaN that the script takes out again, such as padded targets, does no harm, and does not explain a loss that is
NaN for another reason. So the step is run again with finite numbers in the place of those values: only where FP32 comes
through it then are the data to blame.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch

from ampdbg.agreement import is_finite
from ampdbg.probes.tensors import bad_data, float_values, leaves_of, may_be_bad
from ampdbg.record.run import TensorCounts
from ampdbg.replay.copies import altered_batch
from ampdbg.replay.replay import FP32, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot
from ampdbg.replay.step import RecordedCall, RecordedStep


def data_of(played: RecordedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that come from outside of a step, each once with its name: those of a batch that one call alone is
    given by their path, and others by what takes them."""
    calls = [(played.calls[number], given[number]) for given in played.given for number in given]
    calls.sort(key=lambda one: bool(one[0].reads))  # what takes the results of others has the targets of a loss, say
    first = [part for call, given in calls if not call.reads for part in given if part]
    batch = leaves_of(first[0]) if len(first) == 1 else ()
    met: set[int] = set()
    for name, tensor in (*batch, *(one for call, given in calls for one in _arguments(call, given))):
        if id(tensor) not in met:
            met.add(id(tensor))
            yield name, tensor


def blamed_data(run: Run, snapshot: Snapshot, played: RecordedStep) -> tuple[TensorCounts, ...]:
    """What of its data is why FP32 does not come through the step.

    Args:
        run: the workload; its weights must still be those of the step.
        snapshot: the step, with what its calls are given as batches.
        played: its calls.
    """
    suspects = [(name, tensor) for name, tensor in data_of(played) if may_be_bad(tensor) and not tensor.requires_grad]
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


def _arguments(call: RecordedCall, given: tuple[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    arguments: list[tuple[Any, Any]] = [*enumerate(given[0], 1), *given[1].items()]
    for argument, value in arguments:
        for path, tensor in leaves_of(value):
            yield f"argument {argument}{path} of {_described(call)}", tensor


def _described(call: RecordedCall) -> str:
    function: Any = call.called
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    return f"{name} on line {call.line[1]} of {PurePath(call.line[0]).name}" if call.line is not None else name


@torch.no_grad()
def _made_finite(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the mean of its finite values, or 1, in the place of the others: numbers of the usual size."""
    values = float_values(tensor)
    finite = values[values.isfinite()] if values is not None else torch.empty(0)
    usual = float(finite.double().mean()) if finite.numel() else 1.0
    return torch.nan_to_num(tensor.detach(), usual, usual, usual).requires_grad_(tensor.requires_grad)
