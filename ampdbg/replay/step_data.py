"""What a step is given from outside, its batch with the targets, and whether inf or NaN in it is why the step fails.

A mask of NaN that the script takes out again, such as padded targets, does no harm, and does not explain a loss that is
NaN for another reason. So the step is run again with finite numbers in the place of those values: only where FP32 comes
through it then are the data to blame.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch

from ampdbg.agreement import is_finite
from ampdbg.probes.tensors import bad_data, float_values, leaves_of, may_be_bad
from ampdbg.record.run import TensorCounts
from ampdbg.replay.copies import altered_batch
from ampdbg.replay.narrowings import NARROWS_OR_MOVES
from ampdbg.replay.pass_end import PassEnd, called_by, losses_of, module_of
from ampdbg.replay.played_step import Given, PlayedStep, TapedCall
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.replay import FP32, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import ModelState, Snapshot


def data_of(played: PlayedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that come from outside of a step, each once with its name: the batch's by its path, and those that
    enter its loss by what takes them."""
    met: set[int] = set()
    for name, tensor in (*_of_first_calls(played), *_of_later_calls(played)):
        if id(tensor) not in met:
            met.add(id(tensor))
            yield name, tensor


def snapshot_of(played: PlayedStep, step: int, random_state: RandomState, state: ModelState) -> Snapshot:
    """The step with what its calls are given as its batches, a part of it each, and the modules that they are of."""
    data = tuple(_data_in(played, part) for part in played.given)
    called = {id(module): module for module in map(module_of, played.calls) if module is not None}
    return Snapshot(
        step, played.given, data, random_state, state, beside=tuple(called.values()), states_beside=played.beside
    )


@dataclass(frozen=True)
class BadData:
    """What a step is given whose inf or NaN are why FP32 does not come through it.

    ``batch`` is data, ``spoilt`` has the names of what the step itself may have computed, in half precision.
    """

    batch: tuple[TensorCounts, ...] = ()
    spoilt: tuple[str, ...] = ()


def blamed_data(run: Run, snapshot: Snapshot, played: PlayedStep, computed: Collection[str] = ()) -> BadData:
    """What of its data is why FP32 does not come through the step.

    Args:
        run: the workload; its weights must still be those of the step.
        snapshot: the step, with what its calls are given as batches.
        played: its calls.
        computed: the names of data that the step itself may have computed.
    """
    suspects = [(name, tensor) for name, tensor in data_of(played) if may_be_bad(tensor)]
    ends = [call for call in played.calls if isinstance(call.function, PassEnd)]
    has_loss = not ends or losses_of(played) > 0  # else its modules may give a mask of -inf

    def comes_through(kept: Collection[int] = ()) -> bool:
        finite = {id(tensor): _made_finite(tensor) for _, tensor in suspects if id(tensor) not in kept}
        batches = [altered_batch(batch, lambda tensor: finite.get(id(tensor), tensor)) for batch in snapshot.batches]
        again = replay_step(run, replace(snapshot, batches=tuple(batches)), FP32).replay
        return is_finite(again) or not (has_loss or again.error or math.isnan(again.loss))

    if not suspects or not comes_through():
        return BadData()
    alone = [one for one in suspects if len(suspects) == 1 or not comes_through({id(one[1])})]
    bad = bad_data(alone or suspects)
    spoilt = tuple(counts.name for counts in bad if counts.name in computed)
    return BadData(tuple(counts for counts in bad if counts.name not in computed), spoilt)


def with_finite_data(played: PlayedStep, names: Collection[str]) -> PlayedStep:
    """The step with finite numbers of the usual size in the place of inf and NaN in these of its data."""
    finite = {id(tensor): _made_finite(tensor) for name, tensor in data_of(played) if name in names}
    given = (altered_batch(part, lambda tensor: finite.get(id(tensor), tensor)) for part in played.given)
    return replace(played, given=tuple(given), replaced=tuple(names))


def _of_first_calls(played: PlayedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """What those calls are given that take nothing which others have made: of one call alone that is the batch."""
    first = [(number, given[number]) for given in played.given for number in given if not played.calls[number].reads]
    parts = [part for _, given in first for part in given if part]
    if len(parts) == 1:
        yield from leaves_of(parts[0])
        return
    for number, given in first:
        yield from _arguments(played.calls[number], given)


def _data_in(played: PlayedStep, part: Given) -> Given:
    """The part without what only casts and moves take that lead into no module: it may be the script's own."""
    of_modules = [played.calls[n].reads for n in part if isinstance(played.calls[n].function, torch.nn.Module)]
    moves = {n for n in part if getattr(played.calls[n].function, "__name__", "") in NARROWS_OR_MOVES}
    aside = moves.difference(*of_modules)
    return {n: given for n, given in part.items() if n not in aside}


def _of_later_calls(played: PlayedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """What enters calls that take results of others, such as the targets of a loss."""
    for given in played.given:
        for number in given:
            if played.calls[number].reads:
                yield from _arguments(played.calls[number], given[number])


def _arguments(call: TapedCall, given: tuple[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    arguments: list[tuple[Any, Any]] = [*enumerate(given[0], 1), *given[1].items()]
    for argument, value in arguments:
        for path, tensor in leaves_of(value):
            yield f"argument {argument}{path} of {_described(call)}", tensor


def _described(call: TapedCall) -> str:
    function: Any = called_by(call)
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    return f"{name} on line {call.line[1]} of {PurePath(call.line[0]).name}" if call.line is not None else name


@torch.no_grad()
def _made_finite(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the mean of its finite values, or 1, in the place of the others: numbers of the usual size."""
    values = float_values(tensor)
    finite = values[values.isfinite()] if values is not None else torch.empty(0)
    usual = float(finite.double().mean()) if finite.numel() else 1.0
    return torch.nan_to_num(tensor.detach(), usual, usual, usual).requires_grad_(tensor.requires_grad)
