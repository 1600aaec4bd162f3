"""What the forward passes of a loop change in its modules besides weights, as it was before them.

Each module is looked at whole in its first calls. From then on only what these were seen to change is held: the
statistics of batch norms, say, a counter of steps, or the weights of a momentum encoder, and no mask of attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.probes.tensors import is_emptied, is_finite, times_written
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import TENSOR, Held, Kind, held_before_a_step

LOOKED_AT = 2
"""So many calls of each module are looked at whole."""


SAMPLE = 1024
"""About so many entries of a frozen parameter show whether a call that is looked at writes it."""


NOTHING = Held({})

FrozenSample = tuple[int, torch.Tensor]
"""Where a parameter lies in memory, and some of its entries: ``.data`` hides from its version that it was written."""


class _Kept(NamedTuple):
    """What a module held before one call, and how often each of its buffers and parameters had been written; in a call
    that is looked at a ``sample`` of each frozen parameter too."""

    held: Held
    written: Mapping[str, int]
    samples: Mapping[str, FrozenSample]


@dataclass
class _Root:
    """What is ``kept`` from before those calls of a module that are noted, by their number.

    ``changes`` is what its calls were seen to change. ``left`` is how often each of its ``untrained`` tensors had been
    written as the last call returned, and ``rewritten`` has those that were written between two calls, each with the
    later one.
    """

    calls: int = 0
    kept: dict[int, _Kept] = field(default_factory=dict)
    changes: dict[int, tuple[Callable[[], Any], Kind]] = field(default_factory=dict)
    tensors: weakref.WeakValueDictionary[str, torch.Tensor] = field(default_factory=weakref.WeakValueDictionary)
    untrained: Sequence[str] = ()
    left: Mapping[str, int] = field(default_factory=dict)
    rewritten: dict[str, int] = field(default_factory=dict)

    @property
    def is_looked_at(self) -> bool:
        """The call is looked at whole."""
        return self.calls <= LOOKED_AT

    def begins(self, number: int, module: torch.nn.Module) -> None:
        """Holds what is to be held before a call."""
        self.calls += 1
        if self.is_looked_at:
            own = {**dict(module.named_buffers()), **dict(module.named_parameters())}
            self.tensors = weakref.WeakValueDictionary(own)
            self.untrained = [name for name, one in own.items() if not one.requires_grad]
        written = {name: times_written(one) for name, one in self.tensors.items()}
        self.rewritten |= {name: number for name, times in self.left.items() if written.get(name, times) != times}
        frozen = {name: one for name, one in self.tensors.items() if self.is_looked_at and _is_frozen(one)}
        self.kept[number] = _Kept(self._held(module), written, _samples(frozen))

    def _held(self, module: torch.nn.Module) -> Held:
        if not self.is_looked_at and not self.changes:
            return NOTHING
        with torch.no_grad(), _disable_current_modes():
            known = Held.now(self._changing())
            return held_before_a_step(module).with_earlier(known) if self.is_looked_at else known

    def _changing(self) -> list[tuple[Any, Kind]]:
        changes = [(value, kind) for alive, kind in self.changes.values() if (value := alive()) is not None]
        entries = (one for value, kind in changes if kind.holds for one in kind.inner(kind.save(value)))
        # Another tensor may come to stand in a register of buffers: what stood there is known by that alone.
        return [*((one, TENSOR) for one in entries if isinstance(one, torch.Tensor)), *changes]

    def returned(self, number: int) -> None:
        """Learns from a call that was looked at whole what calls change."""
        untrained = ((name, self.tensors.get(name)) for name in self.untrained)
        self.left = {name: times_written(one) for name, one in untrained if one is not None}
        if not self.is_looked_at:
            self._learn(self.kept[number].written)
            return
        held = self.kept[number].held
        with torch.no_grad(), _disable_current_modes():
            changed = [(value, kind) for value, kind in held.values if kind.draws or not held.is_as_saved(value)]
            changed += [(self.tensors[name], TENSOR) for name in self._written(self.kept[number])]
        self.changes.update((id(value), (_reference(value), kind)) for value, kind in changed)

    def _learn(self, before: Mapping[str, int]) -> None:
        """Has those buffers held from now on that a later call was the first to write, as that of a discriminator which
        begins late."""
        written = (self.tensors.get(name) for name, times in self.left.items() if times != before.get(name, times))
        self.changes |= {id(one): (_reference(one), TENSOR) for one in written if one is not None} | self.changes

    def first_of(self, calls: Collection[int]) -> int | None:
        """The first of these calls that is one of this module."""
        return min((number for number in self.kept if number in calls), default=None)

    def _written(self, kept: _Kept) -> list[str]:
        """The buffers and parameters that were written since."""
        samples = _samples({name: self.tensors[name] for name in kept.samples.keys() & self.tensors.keys()})
        others = {name for name, sample in samples.items() if not _are_same(sample, kept.samples[name])}
        return [
            name
            for name, times in kept.written.items()
            if name in self.tensors and (name in others or times_written(self.tensors[name]) != times)
        ]

    def unheld(self, kept: _Kept) -> Iterator[str]:
        """The buffers and parameters that were written since and are not held."""
        for name in self._written(kept):
            if self.tensors[name] not in kept.held:
                yield f"{'parameter' if isinstance(self.tensors[name], torch.nn.Parameter) else 'buffer'} {name}"

    def unknown(self, kept: _Kept) -> Iterator[str]:
        """The same; they are held from the next call on."""
        for name in self.unheld(kept):
            self.calls = 0
            yield name


def _is_frozen(tensor: torch.Tensor) -> bool:
    """It is a parameter that no optimizer trains, and has memory that can be read."""
    is_kept_still = type(tensor) is torch.nn.Parameter and not tensor.requires_grad
    return is_kept_still and tensor.layout is torch.strided and not tensor.is_meta and not is_emptied(tensor)


def _samples(frozen: Mapping[str, torch.Tensor]) -> Mapping[str, FrozenSample]:
    if not frozen:
        return {}
    with torch.no_grad(), _disable_current_modes():
        flat = {name: one.reshape(-1) for name, one in frozen.items()}
        return {name: (one.data_ptr(), one[:: max(1, len(one) // SAMPLE)].clone()) for name, one in flat.items()}


def _are_same(one: FrozenSample, other: FrozenSample) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


class Before:
    """What called modules held before those of their calls that are noted still."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[torch.nn.Module], _Root]] = {}
        """By the ``id`` of a module, which may be another's by now."""

    @property
    def _roots(self) -> list[_Root]:
        return [root for alive, root in self._alive.values() if alive() is not None]

    def _root(self, module: torch.nn.Module) -> _Root | None:
        alive, root = self._alive.get(id(module), (None, None))
        return root if alive is not None and alive() is module else None

    def begins(self, number: int, module: torch.nn.Module) -> None:
        """To be called before the call of this number."""
        root = self._root(module)
        if root is None:
            root = _Root()
            self._alive = {key: known for key, known in self._alive.items() if known[0]() is not None}
            self._alive[id(module)] = weakref.ref(module), root
        root.begins(number, module)

    def forget(self, number: int, module: torch.nn.Module) -> None:
        """Lets go of what the module held before the call of this number."""
        root = self._root(module)
        if root is not None:
            root.kept.pop(number, None)

    def returned(self, number: int, module: torch.nn.Module) -> None:
        """To be called when it has returned."""
        root = self._root(module)
        if root is not None and number in root.kept:
            root.returned(number)

    def is_known(self, number: int) -> bool:
        """What the module of a call held before it is known, but for weights that optimizers train."""
        kept = ((root, root.kept[number]) for root in self._roots if number in root.kept)
        return all(not any(True for _ in root.unheld(one)) for root, one in kept)

    def state(self, model: torch.nn.Module, calls: Collection[int]) -> tuple[ModelState, str]:
        """What the model held before these calls, and of which buffer or parameter that is not known; "" of none."""
        held, unknown = held_before_a_step(model), ""
        begun = [(first, root) for root in self._roots if (first := root.first_of(calls)) is not None]
        for first, root in sorted(begun, key=lambda one: -one[0]):  # of what two others hold the earlier counts
            held = held.with_earlier(root.kept[first].held)
            unknown = next(root.unknown(root.kept[first]), unknown)
        return ModelState(held, model), unknown

    def rewritten(self, state: ModelState, calls: Collection[int]) -> Mapping[str, float]:
        """Those buffers of a state that the loop has written right before one of these calls, outside of all calls:
        their largest magnitudes."""
        found = {
            id(root.tensors.get(name))
            for root in self._roots
            for name, number in root.rewritten.items()
            if number in calls
        }
        buffers, before = () if state.model is None else state.model.named_buffers(), state.buffers
        those = [(name, before.get(name, buffer)) for name, buffer in buffers if id(buffer) in found]
        return {name: float(one.abs().amax()) for name, one in those if one.is_floating_point() and one.numel()}

    def poisoned(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        """The names of those buffers that noted calls have made inf or NaN, or have put in the place of others."""
        kept = [one.held for root in self._roots for one in root.kept.values()]
        roots = ((alive(), root) for alive, root in self._alive.values() if root.kept)
        noted = [(module, root.tensors) for module, root in roots if module is not None]
        new = {id(one) for module, old in noted for name, one in module.named_buffers() if old.get(name) is not one}
        for name, buffer in buffers:
            before = [held.copy_of(buffer) for held in kept if buffer in held]
            if (id(buffer) in new or any(map(is_finite, before))) and not is_finite(buffer):
                yield name

    def changing(self, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
        """Those buffers of a state that calls were seen to write; others may be masks, and infinite."""
        changes = {key for root in self._roots for key in root.changes}
        buffers = state.buffers
        for name, buffer in state.model.named_buffers() if state.model is not None else ():
            if id(buffer) in changes and name in buffers:
                yield name, buffers[name]


def _reference(value: Any) -> Callable[[], Any]:
    """What leads to a value, and holds none that can be held weakly: a model goes when its loop lets go of it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
