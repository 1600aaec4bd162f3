"""The calls of a captured step, and which of them a step makes again that comes of the same script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.record.findings import Count
from ampdbg.replay.step import Call, RecordedStep, torch_name


@dataclass(frozen=True)
class CapturedCall:
    """One call: ``name`` says of what, ``reads`` which earlier ones it takes results from, ``given`` is packed."""

    name: str
    reads: tuple[Count, ...]
    given: Any
    lowers: bool
    has_gradients: bool
    writes: bool
    random_state: Count
    training: bool | None = None


def order_of(recorded: RecordedStep) -> dict[int, int]:
    """The numbers of the calls that the step needs, each with its place among them."""
    return {
        number: place for place, number in enumerate(sorted({number for part in recorded.given for number in part}))
    }


def paths_in(model: torch.nn.Module) -> dict[int, str]:
    """The paths of the model's modules by ``id``."""
    return {id(module): name or "the model" for name, module in model.named_modules()}


def name_of(call: Call, paths: Mapping[int, str]) -> str:
    """Of what a call is: a module of the model by its path, another by its class, a function as torch calls it."""
    function = call.called
    if isinstance(function, torch.nn.Module):
        return paths.get(id(function), f"{type(function).__module__}.{type(function).__qualname__}")
    return torch_name(function) or str(getattr(function, "__qualname__", type(function).__qualname__))


def reads_of(call: Call, numbers: Mapping[int, int]) -> tuple[int, ...]:
    """The places of the calls that a call takes results from."""
    return tuple(sorted({numbers[other] for other in call.reads if other in numbers}))


@dataclass(frozen=True)
class Difference:
    """Why a step is not of the captured calls, and how many of its first ones are."""

    alike: int
    reason: str


class Match:
    """Which call of a step, of the script that was started again, is which of the captured ones.

    ``own`` has the number of each call that the step needs with its place among the captured ones, ``casts`` those to
    FP32 that a patch has put in, each with the place of what it casts.

    Args:
        captured: the calls of the captured step, in order.
        parts: the places of those of each part of it.
        recorded: the step.
        is_patched: its code has a patch.
    """

    def __init__(
        self,
        captured: Sequence[CapturedCall],
        parts: Sequence[Sequence[int]],
        recorded: RecordedStep,
        *,
        is_patched: bool,
    ) -> None:
        self._captured, self._parts, self._recorded, self._is_patched = captured, parts, recorded, is_patched
        self.own: dict[int, int] = {}
        self.casts: dict[int, int] = {}
        for number in order_of(recorded):
            call, place = recorded.calls[number], len(self.own)
            is_cast = is_patched and call.function is torch.Tensor.float and bool(call.reads)
            if is_cast and not any(known.name == "torch.Tensor.float" for known in captured[place : place + 1]):
                read = max(call.reads)
                self.casts[number] = self.own[read] if read in self.own else self.casts[read]
            else:
                self.own[number] = place

    def why_not(self, model: torch.nn.Module) -> Difference | None:
        """Why the step is not of the same calls; None where it is."""
        paths, numbers = paths_in(model), {**self.own, **self.casts}
        for number, place in self.own.items():
            if other := self._other(self._recorded.calls[number], place, paths, numbers):
                return Difference(place, other)
        reason = self._unlike_as_a_whole()
        return Difference(len(self.own), reason) if reason else None

    def _other(self, call: Call, place: int, paths: Mapping[int, str], numbers: Mapping[int, int]) -> str:
        """How a call is not the captured one of its place."""
        if place >= len(self._captured):
            return ""
        known, now = self._captured[place], name_of(call, paths)
        if now != known.name:
            return f"call {place + 1} is of {now}, and was of {known.name}"
        is_same = set(reads_of(call, numbers)) == set(known.reads)
        return "" if is_same else f"call {place + 1}, of {now}, takes what other calls gave"

    def _unlike_as_a_whole(self) -> str:
        """What is other about the step where each of its calls is as captured."""
        if len(self.own) != len(self._captured):
            return f"it makes {len(self.own)} calls, and made {len(self._captured)}"
        parts = [[self.own[number] for number in sorted(part) if number in self.own] for part in self._recorded.given]
        if parts != [list(part) for part in self._parts]:
            return "its calls lead to other losses"
        first = next(iter(self.own), None)
        if self._is_patched and first is not None and self._recorded.calls[first].lowers != self._captured[0].lowers:
            return "autocast is on in one of them, and off in the other"  # a patch begins behind the model
        return ""
