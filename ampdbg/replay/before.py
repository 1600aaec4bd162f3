"""What the forward passes of a loop change in its modules besides weights, as it was before them.

Each module is looked at whole in its first calls. From then on only what these were seen to change is held: the
statistics of batch norms, say, or a counter of steps, and no mask of attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.probes.tensors import is_finite, times_written
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import TENSOR, Held, Kind, held_before_a_step

LOOKED_AT = 2
"""So many calls of each module are looked at whole."""


NOTHING = Held({})


class _Kept(NamedTuple):
    """What a module held before one call, and how often each of its buffers had been written."""

    held: Held
    written: dict[str, int]


@dataclass
class _Root:
    """What is ``kept`` from before those calls of a module that are noted, by their number.

    ``changes`` is what its calls were seen to change.
    """

    calls: int = 0
    kept: dict[int, _Kept] = field(default_factory=dict)
    changes: dict[int, tuple[Callable[[], Any], Kind]] = field(default_factory=dict)
    buffers: weakref.WeakValueDictionary[str, torch.Tensor] = field(default_factory=weakref.WeakValueDictionary)

    @property
    def is_looked_at(self) -> bool:
        """Whether the call is looked at whole."""
        return self.calls <= LOOKED_AT

    def begins(self, number: int, module: torch.nn.Module, noted: Collection[int]) -> None:
        """Holds what is to be held before a call."""
        self.calls += 1
        if self.is_looked_at:
            self.buffers = weakref.WeakValueDictionary(module.named_buffers())
        written = {name: times_written(buffer) for name, buffer in self.buffers.items()}
        self.kept = {call: kept for call, kept in self.kept.items() if call in noted}
        self.kept[number] = _Kept(self._held(module), written)

    def _held(self, module: torch.nn.Module) -> Held:
        if not self.is_looked_at and not self.changes:
            return NOTHING
        with torch.no_grad(), _disable_current_modes():
            return held_before_a_step(module) if self.is_looked_at else Held.now(self._changing())

    def _changing(self) -> list[tuple[Any, Kind]]:
        changes = [(value, kind) for alive, kind in self.changes.values() if (value := alive()) is not None]
        entries = (one for value, kind in changes if kind.holds for one in kind.inner(kind.save(value)))
        # Another tensor may come to stand in a register of buffers: what stood there is known by that alone.
        return [*((one, TENSOR) for one in entries if isinstance(one, torch.Tensor)), *changes]

    def returned(self, number: int) -> None:
        """Learns from a call that was looked at whole what calls change."""
        if not self.is_looked_at:
            return
        held = self.kept[number].held
        with torch.no_grad(), _disable_current_modes():
            changed = [(value, kind) for value, kind in held.values if kind.draws or not held.is_as_saved(value)]
        self.changes.update((id(value), (_reference(value), kind)) for value, kind in changed)

    def first_of(self, calls: Collection[int]) -> int | None:
        """The first of these calls that is one of this module."""
        return min((number for number in self.kept if number in calls), default=None)

    def unknown(self, kept: _Kept) -> Iterator[str]:
        """The buffers that were written since and are not held; they are from the next call on."""
        for name, times in kept.written.items():
            buffer = self.buffers.get(name)
            if buffer is not None and buffer not in kept.held and times_written(buffer) != times:
                self.calls = 0
                yield name


class Before:
    """What called modules held before those of their calls that are noted still."""

    def __init__(self) -> None:
        self._roots: MutableMapping[torch.nn.Module, _Root] = WeakIdKeyDictionary()

    def begins(self, number: int, module: torch.nn.Module, noted: Collection[int]) -> None:
        """To be called before the call of this number; ``noted`` are the earlier ones that are kept."""
        self._roots.setdefault(module, _Root()).begins(number, module, noted)

    def returned(self, number: int, module: torch.nn.Module) -> None:
        """To be called when it has returned."""
        root = self._roots.get(module)
        if root is not None and number in root.kept:
            root.returned(number)

    def state(self, model: torch.nn.Module, calls: Collection[int]) -> tuple[ModelState, str]:
        """What the model held before these calls, and the name of a buffer of which that is not known; "" of none."""
        held, unknown = held_before_a_step(model), ""
        begun = [(first, root) for root in self._roots.values() if (first := root.first_of(calls)) is not None]
        for first, root in sorted(begun, key=lambda one: -one[0]):  # of what two others hold the earlier counts
            held = held.with_earlier(root.kept[first].held)
            unknown = next(root.unknown(root.kept[first]), unknown)
        return ModelState.of(model, held), unknown

    def poisoned(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        """The names of those buffers that noted calls have made inf or NaN."""
        kept = [one.held for root in self._roots.values() for one in root.kept.values()]
        for name, buffer in buffers:
            before = [held.copy_of(buffer) for held in kept if buffer in held]
            if any(map(is_finite, before)) and not is_finite(buffer):
                yield name

    def changing(self, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
        """Those buffers of a state that calls were seen to write; others may be masks, and infinite."""
        changes = {key for root in self._roots.values() for key in root.changes}
        for name, buffer in state.model.named_buffers() if state.model is not None else ():
            if id(buffer) in changes and name in state.buffers:
                yield name, state.buffers[name]


def _reference(value: Any) -> Callable[[], Any]:
    """What leads to a value, and holds none that can be held weakly: a model goes when its loop lets go of it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
