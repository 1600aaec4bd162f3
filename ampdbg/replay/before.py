"""What the forward passes of a loop change in its modules besides weights, as it was before them.

Each module is looked at whole in its first calls. From then on only what these were seen to change is kept: the
statistics of batch norms, say, or a counter of steps, and no mask of attention.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.probes.tensors import times_written
from ampdbg.replay.copies import Copying, Left
from ampdbg.replay.snapshot import ModelState, SavedTensor
from ampdbg.replay.state import MOST, duplicated, own_attributes

LOOKED_AT = 2
"""So many calls of each module are looked at whole."""

Slot = tuple[str, str]
"""The name of a module below the one that is called, and of its buffer or attribute."""


@dataclass
class _Root:
    """A module that a loop calls, and what of it is kept from before call ``since``: ``buffers`` and ``attributes``.

    ``changed`` are the slots that a call was seen to change, ``written`` has how often each buffer had been written.
    """

    module: weakref.ref[torch.nn.Module]
    owners: dict[str, weakref.ref[torch.nn.Module]]
    calls: int = 0
    since: int = -1
    buffers: dict[Slot, torch.Tensor] = field(default_factory=dict)
    attributes: dict[Slot, Any] = field(default_factory=dict)
    changed: set[Slot] = field(default_factory=set)
    written: dict[Slot, tuple[torch.Tensor, int]] = field(default_factory=dict)
    marks: dict[Slot, Any] = field(default_factory=dict)

    @staticmethod
    def of(module: torch.nn.Module) -> _Root:
        return _Root(weakref.ref(module), {name: weakref.ref(owner) for name, owner in module.named_modules()})

    def alive(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Its modules that are there still, by name."""
        return ((name, owner) for name, held in self.owners.items() if (owner := held()) is not None)

    def buffers_now(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        for name, owner in self.alive():
            yield from (((name, key), buffer) for key, buffer in owner._buffers.items() if buffer is not None)

    def attributes_now(self) -> Iterator[tuple[Slot, Any]]:
        for name, owner in self.alive():
            if not isinstance(owner, torch.jit.ScriptModule):
                yield from (((name, key), value) for key, value in own_attributes(owner).items())

    def is_looked_at(self) -> bool:
        return self.calls <= LOOKED_AT

    def keep(self) -> None:
        """Keeps what it holds now: all of it, or what its calls are known to change."""
        copying = Copying(_saved, strict=True)
        self.written = {slot: (buffer, times_written(buffer)) for slot, buffer in self.buffers_now()}
        wanted = {slot: one for slot, (one, _) in self.written.items() if self.is_looked_at() or slot in self.changed}
        olds = {slot: self.buffers[slot] for slot in wanted if slot in self.buffers}
        if olds.keys() == wanted.keys() and all(_is_alike(old, wanted[slot]) for slot, old in olds.items()):
            torch._foreach_copy_(list(olds.values()), [wanted[slot] for slot in olds]) if olds else None
        else:
            olds = {slot: duplicated(buffer.detach()) for slot, buffer in wanted.items()}
        self.buffers = olds
        if self.is_looked_at():
            every = dict(self.attributes_now())
            self.marks = {slot: (value, _mark(value)) for slot, value in every.items()}
            self.attributes = copying.each(every)  # type: ignore[arg-type, assignment]
        else:
            held = dict(self.alive()) if self.changed - set(self.written) else {}
            slots = [slot for slot in self.changed if slot[0] in held and slot[1] in vars(held[slot[0]])]
            self.attributes = {slot: copying.of(vars(held[slot[0]])[slot[1]]) for slot in slots}

    def learn(self) -> None:
        """To be called behind a call that is looked at whole: notes what it has changed."""
        now = dict(self.attributes_now())
        was = {slot: mark for slot, (_, mark) in self.marks.items()}
        self.changed |= {slot for slot, value in now.items() if was.get(slot) != _mark(value)}
        self.changed |= {slot for slot in self.written if self.is_written(slot)}
        self.marks = {}

    def is_written(self, slot: Slot) -> bool:
        """Whether a buffer was written, or another stands in its place, since it was kept."""
        (name, key), (buffer, times) = slot, self.written[slot]
        owner = self.owners[name]()
        return owner is None or owner._buffers.get(key) is not buffer or times_written(buffer) != times


class Before:
    """What called modules held before those of their calls that are noted still."""

    def __init__(self) -> None:
        self._roots: dict[int, _Root] = {}

    def begins(self, number: int, module: torch.nn.Module, noted: Collection[int]) -> None:
        """To be called before the call of this number; what an earlier one that is ``noted`` still has found stays."""
        root = self._roots.get(id(module))
        if root is None or root.module() is not module:
            root = self._roots[id(module)] = _Root.of(module)
        if root.since not in noted:
            root.since, root.calls = number, root.calls + 1
            with torch.no_grad(), _disable_current_modes():
                root.keep()

    def returned(self, number: int, module: torch.nn.Module) -> None:
        """To be called when it has returned."""
        root = self._roots.get(id(module))
        if root is not None and root.since == number and root.is_looked_at():
            root.learn()

    def changing(self, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
        """Those buffers of a state that calls were seen to write; others may be masks, and infinite."""
        slots = {slot[1] for root in self._roots.values() for slot in root.changed}
        return ((name, buffer) for name, buffer in state.buffers.items() if name.rpartition(".")[2] in slots)

    def state(self, model: torch.nn.Module, calls: Collection[int]) -> tuple[ModelState, str]:
        """What the model held before these calls, and the name of a buffer of which that is not known; "" of none.

        Such a buffer is kept from the next call on.
        """
        state, names, unknown = ModelState.now(model), {id(one): name for name, one in model.named_modules()}, ""
        buffers, attributes = dict(state.buffers), {name: dict(held) for name, held in state.attributes.items()}
        begun = (root for root in self._roots.values() if root.since in calls)
        for root in sorted(begun, key=lambda root: -root.since):  # of one in two others the earlier counts
            paths = {name: names[id(owner)] for name, owner in root.alive() if id(owner) in names}
            buffers |= {_joined(paths[slot[0]], slot[1]): one for slot, one in root.buffers.items() if slot[0] in paths}
            for (name, key), value in root.attributes.items():
                if name in paths:
                    attributes.setdefault(paths[name], {})[key] = value
            lost = [slot for slot in root.written if slot not in root.buffers and root.is_written(slot)]
            root.changed |= set(lost)
            unknown = next((_joined(paths[name], key) for name, key in lost if name in paths), unknown)
        return replace(state, buffers=buffers, attributes=attributes), unknown


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}".lstrip(".")


def _saved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return Left.AS_IT_IS
    try:
        return SavedTensor.of(value)
    except Exception:  # noqa: BLE001 - a class of the user's own may raise anything
        return Left.AS_IT_IS


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_plain = type(other) is torch.Tensor and other.layout is torch.strided and not other.is_inference()
    return is_plain and one.shape == other.shape and one.dtype is other.dtype and one.device == other.device


def _mark(value: Any) -> Any:
    """What changes where an attribute does: another object, another entry of a container, a draw of random numbers."""
    if isinstance(value, torch.Tensor):
        return id(value), times_written(value)
    if isinstance(value, (dict, list, set, deque)):
        flat = [*value, *(value.values() if isinstance(value, dict) else ())]
        return id(value), tuple(map(id, flat[:MOST]))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes() if value.device.type == "cpu" else object()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    return id(value)
