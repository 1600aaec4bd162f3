"""The calls of a captured step, and which of them a step makes again that comes of the same script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.record.findings import Count
from ampdbg.replay.narrowings import NARROWS_OR_MOVES
from ampdbg.replay.packing import type_name
from ampdbg.replay.pass_end import called_by
from ampdbg.replay.played_step import Made, Own, PlayedStep, TapedCall, torch_name

CASTS = ("torch.Tensor.to", "torch.Tensor.type", "torch.Tensor.type_as")
"""What casts to the format of another tensor."""

OWN = type_name(Own)
"""So what stands for a model's own tensor is written."""


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
    hands_on: bool = False


def order_of(played: PlayedStep) -> dict[int, int]:
    """The numbers of the calls that the step needs, each with its place among them."""
    return {number: place for place, number in enumerate(sorted({number for part in played.given for number in part}))}


def paths_in(model: torch.nn.Module) -> dict[int, str]:
    """The paths of the model's modules by ``id``."""
    return {id(module): name or "the model" for name, module in model.named_modules()}


def name_of(call: TapedCall, paths: Mapping[int, str]) -> str:
    """Of what a call is: a module of the model by its path, another by its class, a function as torch calls it."""
    function = called_by(call)
    if isinstance(function, torch.nn.Module):
        return paths.get(id(function), f"{type(function).__module__}.{type(function).__qualname__}")
    return torch_name(function) or str(getattr(function, "__qualname__", type(function).__qualname__))


def reads_of(call: TapedCall, numbers: Mapping[int, int]) -> tuple[int, ...]:
    """The places of the calls that a call takes results from."""
    return tuple(sorted({numbers[other] for other in call.reads if other in numbers}))


def data_calls(captured: Sequence[CapturedCall]) -> set[int]:
    """The places of the functions of torch's that take nothing but the script's own data, or what others of them make
    of it."""
    found: set[int] = set()
    for place, call in enumerate(captured):
        is_function = call.name.startswith("torch.") and not call.name.startswith("torch.nn.modules.")
        is_of_data = found.issuperset(call.reads) or (call.hands_on and _is_tensor(first_given(call)))
        if is_function and is_of_data and not _has_own(call.given):  # as the weights in a penalty
            found.add(place)
    return found


def first_given(call: CapturedCall) -> Any:
    """The first argument of a call, packed; None where it has none."""
    match call.given:
        case {"list": [{"tuple": [first, *_]}, _]}:
            return first
    return None


def _is_tensor(packed: Any) -> bool:
    return isinstance(packed, dict) and "tensor" in packed


def _has_own(packed: Any) -> bool:
    if isinstance(packed, dict):
        return packed.get("live") == OWN or any(map(_has_own, packed.values()))
    return isinstance(packed, list) and any(map(_has_own, packed))


@dataclass(frozen=True)
class Difference:
    """Why a step is not of the captured calls, and how many of its first ones are."""

    alike: int
    reason: str


class Match:
    """Which call of a step, of the script that was started again, is which of the captured ones.

    ``own`` has the number of each call that the step needs with its place among the captured ones, ``casts`` those
    that a patch has put in, each with the place of what it casts, ``spare`` the numbers of those that only compute what
    the captured step has as data, and ``left`` the places that no call has.

    Args:
        captured: the calls of the captured step, in order.
        parts: the places of those of each part of it.
        played: the step.
        is_patched: its code has a patch, which may put casts in and leave others out.
    """

    def __init__(
        self, captured: Sequence[CapturedCall], parts: Sequence[Sequence[int]], played: PlayedStep, *, is_patched: bool
    ) -> None:
        self._captured, self._parts, self._played = captured, parts, played
        self._is_patched = is_patched
        self.own: dict[int, int] = {}
        self.casts: dict[int, int] = {}
        self.spare: set[int] = set()
        self._data: set[int] = set()
        self._known_data = data_calls(captured)
        place = 0
        for number in order_of(played):
            call = played.calls[number]
            if self._is_of_data(number, call):
                self._data.add(number)
            if number in self._data and not self._is_known(call, place):
                self._add_spare(number, call)
            elif self._is_of_patch(call, place):
                read = max(call.reads)
                self.casts[number] = self.own[read] if read in self.own else self.casts[read]
            else:
                while self._may_be_left_out(place) and name_of(call, {}) != captured[place].name:
                    place += 1
                self.own[number] = place
                place += 1
        self.left = {*range(len(captured))}.difference(self.own.values())
        self._passing = dict.fromkeys(self.left, ()) | dict(self._handing_on())

    def why_not(self, model: torch.nn.Module) -> Difference | None:
        """Why the step is not of the same calls; None where it is."""
        paths, numbers = paths_in(model), {**self.own, **self.casts}
        for alike, (number, place) in enumerate(self.own.items()):
            if other := self._other(self._played.calls[number], place, paths, numbers):
                return Difference(alike, other)
        reason = self._unlike_as_a_whole()
        return Difference(len(self.own), reason) if reason else None

    def _other(self, call: TapedCall, place: int, paths: Mapping[int, str], numbers: Mapping[int, int]) -> str:
        """How a call is not the captured one of its place."""
        if place >= len(self._captured):
            return ""
        known, now = self._captured[place], name_of(call, paths)
        if now != known.name:
            return f"call {place + 1} is of {now}, and was of {known.name}"
        is_same = self._through(reads_of(call, numbers)) == self._through(known.reads)
        return "" if is_same else f"call {place + 1}, of {now}, takes what other calls gave"

    def _unlike_as_a_whole(self) -> str:
        """What is other about the step where each of its calls is as captured."""
        if len(self.own) + sum(map(self._may_be_left_out, self.left)) != len(self._captured):
            return f"it makes {len(self.own)} calls, and made {len(self._captured)}"
        parts = [[self.own[number] for number in sorted(part) if number in self.own] for part in self._played.given]
        if parts != [[place for place in part if place not in self.left] for part in self._parts]:
            return "its calls lead to other losses"
        first = next(iter(self.own), None)
        if self._is_patched and first is not None and self._played.calls[first].lowers != self._captured[0].lowers:
            return "autocast is on in one of them, and off in the other"  # a patch begins behind the model
        return ""

    def _add_spare(self, number: int, call: TapedCall) -> None:
        """Adds a call of a patched step on the script's data that the captured one has not made: a cast of what it has
        made in half, which had nothing to do there, or one that is no matter."""
        first = self._first(number)
        source = {**self.own, **self.casts}.get(first.call) if isinstance(first, Made) else None
        if source is not None and getattr(call.function, "__name__", "") in NARROWS_OR_MOVES:
            self.casts[number] = source
        else:
            self.spare.add(number)

    def _handing_on(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The places of casts that gave the very tensor that they were given, in one of the steps, each with the place
        of what has made that, if any: whoever takes it there takes what the cast gave, and here what that was given."""
        numbers = {**self.own, **self.casts}
        for number, place in self.own.items():
            known = self._captured[place : place + 1]
            if self._played.calls[number].hands_on or any(call.hands_on for call in known):
                first = self._first(number)
                yield place, (numbers[first.call],) if isinstance(first, Made) and first.call in numbers else ()

    def _through(self, reads: Sequence[int]) -> set[int]:
        """The places that these stand for, where casts hand on what they are given."""
        found, waiting = set[int](), list(reads)
        while waiting:
            place = waiting.pop()
            waiting += self._passing.get(place, ())
            found |= {place}.difference(self._passing)
        return found

    def _first(self, number: int) -> Any:
        """The first argument of a call."""
        args, _ = next(part[number] for part in self._played.given if number in part)
        return args[0] if args else None

    def _is_of_data(self, number: int, call: TapedCall) -> bool:
        """Whether a function of torch's takes nothing but the script's own data, or what others of them make of it."""
        if not torch_name(call.function) or call.weights:
            return False
        first = self._first(number) if call.hands_on else None
        is_handed_on = isinstance(first, torch.Tensor) or (isinstance(first, Made) and first.call in self._data)
        return call.reads <= self._data or is_handed_on

    def cast_before(self, place: int) -> CapturedCall | None:
        """The cast that a captured call takes a result from, and the step may not; None where it takes of several."""
        reads = self._captured[place].reads
        casts = [
            read
            for read in reads
            if read in self.left or (self._captured[read].hands_on and _is_tensor(first_given(self._captured[read])))
        ]
        return self._captured[casts[0]] if len(casts) == 1 else None

    def _is_known(self, call: TapedCall, place: int) -> bool:
        """Whether a call that takes data is the next captured one, or a cast of one: what makes of the script's data
        what the captured step has made in half is on the tape of a patched one, and so may be more of its kind."""
        while self._may_be_left_out(place) and name_of(call, {}) != self._captured[place].name:
            place += 1
        is_alike = place in self._known_data or call.hands_on
        is_next = any(known.name == name_of(call, {}) for known in self._captured[place : place + 1]) and is_alike
        return is_next or not self._is_patched or (self._is_of_patch(call, place) and not call.reads & self.spare)

    def _may_be_left_out(self, place: int) -> bool:
        """Whether a captured call only casts what the script gave it, such as a target: where a patch has made FP32 of
        what that was cast to the format of, nothing is cast any more."""
        known = self._captured[place : place + 1]
        return self._is_patched and any(call.name in CASTS and not call.reads for call in known)

    def _is_of_patch(self, call: TapedCall, place: int) -> bool:
        """Whether it is a cast to FP32, where the captured step has made none."""
        is_cast = self._is_patched and call.function is torch.Tensor.float and bool(call.reads)
        return is_cast and not any(known.name == "torch.Tensor.float" for known in self._captured[place : place + 1])
