"""What the forward passes of a loop change in its modules besides weights, as it was before them.

Each module is looked at whole in its first calls. From then on only what these were seen to change is held: the
statistics of batch norms, say, or a counter of steps, and no mask of attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.probes.tensors import times_written
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import Held, Kind, held_before_a_step

LOOKED_AT = 2
"""So many calls of each module are looked at whole."""


@dataclass
class _Root:
    """A module that a loop calls, and what of it is ``held`` from before each of its calls.

    ``changes`` is what its calls were seen to change; ``written`` has how often each of its buffers had been written
    before the latest call.
    """

    module: weakref.ref[torch.nn.Module]
    calls: int = 0
    held: dict[int, Held] = field(default_factory=dict)
    changes: dict[int, tuple[Callable[[], Any], Kind]] = field(default_factory=dict)
    buffers: dict[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def begins(self, number: int, noted: Collection[int]) -> None:
        """Holds what is to be held before a call."""
        self.calls, module = self.calls + 1, self.module()
        self.held = {known: held for known, held in self.held.items() if known in noted}
        if self.calls <= LOOKED_AT and module is not None:
            self.buffers = {name: weakref.ref(buffer) for name, buffer in module.named_buffers()}
        self.written = {name: times_written(one) for name, held in self.buffers.items() if (one := held()) is not None}
        if self.calls <= LOOKED_AT and module is not None:
            self.held[number] = held_before_a_step(module)
        else:
            alive = ((held(), kind) for held, kind in self.changes.values())
            self.held[number] = Held.now((value, kind) for value, kind in alive if value is not None)

    def returned(self, number: int) -> None:
        """Learns from a call that was looked at whole what calls change."""
        times = {id(one): self.written[name] for name, held in self.buffers.items() if (one := held()) is not None}
        before = self.held[number]
        for value, kind in before.values if self.calls <= LOOKED_AT else ():
            is_buffer = isinstance(value, torch.Tensor) and id(value) in times
            is_as_it_was = times_written(value) == times[id(value)] if is_buffer else before.is_as_saved(value)
            if kind.draws or not is_as_it_was:
                self.changes[id(value)] = _reference(value), kind

    def unknown(self, held: Held) -> Iterator[str]:
        """The buffers that were written since and are not held; they are from the next call on."""
        for name, times in self.written.items():
            buffer = self.buffers[name]()
            if buffer is not None and buffer not in held and times_written(buffer) != times:
                self.calls = 0
                yield name


class Before:
    """What called modules held before those of their calls that are noted still."""

    def __init__(self) -> None:
        self._roots: dict[int, _Root] = {}

    def begins(self, number: int, module: torch.nn.Module, noted: Collection[int]) -> None:
        """To be called before the call of this number; what was held before those not ``noted`` any more goes."""
        root = self._roots.get(id(module))
        if root is None or root.module() is not module:
            root = self._roots[id(module)] = _Root(weakref.ref(module))
        with torch.no_grad(), _disable_current_modes():
            root.begins(number, noted)

    def returned(self, number: int, module: torch.nn.Module) -> None:
        """To be called when it has returned."""
        root = self._roots.get(id(module))
        if root is not None and number in root.held:
            with torch.no_grad(), _disable_current_modes():
                root.returned(number)

    def state(self, model: torch.nn.Module, calls: Collection[int]) -> tuple[ModelState, str]:
        """What the model held before these calls, and the name of a buffer of which that is not known; "" of none."""
        held, unknown = held_before_a_step(model), ""
        begun = [(min(of), root) for root in self._roots.values() if (of := root.held.keys() & set(calls))]
        for number, root in sorted(begun, key=itemgetter(0), reverse=True):  # of what two hold the earlier counts
            held = held.with_earlier(root.held[number])
            unknown = next(root.unknown(root.held[number]), unknown)
        return ModelState.of(model, held), unknown

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
