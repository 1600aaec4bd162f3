"""The state of a loop's modules before their forward passes change it, without the weights that an optimizer trains.

The first calls of each module are examined whole. After that, only the state that these calls changed is saved. It may
include batch norm statistics, a step counter, or the weights of a momentum encoder, but no attention masks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.probes.tensors import is_emptied, is_finite, times_written
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import TENSOR, Kind, SavedContents, saved_before_step
from ampdbg.replay.step import NotReplayableError

EXAMINED_CALLS = 2
"""The number of calls of each module that are examined whole."""


SAMPLE = 1024
"""The approximate number of entries of a frozen parameter that are compared to find a write by a call."""


NOTHING = SavedContents({})

FrozenSample = tuple[int, torch.Tensor]
"""The address of a parameter and some of its entries: its version counter misses writes through ``.data``."""


class _Kept(NamedTuple):
    """The state of a module before one call, and the versions of its buffers and parameters. For a call that is
    examined whole there are also ``samples`` of frozen parameters."""

    held: SavedContents
    written: Mapping[str, int]
    samples: Mapping[str, FrozenSample]


@dataclass
class _ModuleHistory:
    """The records of one module. ``kept`` has the state before each recorded call by the number of the call.

    ``changes`` has the values that its calls are known to change. ``left`` has the version of each of its ``untrained``
    tensors when the last call returned. ``rewritten`` has the tensors that were written between two calls, each with
    the number of the later call.
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
        """True if the current call is examined whole."""
        return self.calls <= EXAMINED_CALLS

    def begins(self, number: int, module: torch.nn.Module) -> None:
        """Save the state that is needed before a call."""
        self.calls += 1
        if self.is_looked_at:
            own = {**dict(module.named_buffers()), **dict(module.named_parameters())}
            self.tensors = weakref.WeakValueDictionary(own)
            self.untrained = [name for name, one in own.items() if not one.requires_grad]
        written = {name: times_written(one) for name, one in self.tensors.items()}
        self.rewritten |= {name: number for name, times in self.left.items() if written.get(name, times) != times}
        frozen = {name: one for name, one in self.tensors.items() if self.is_looked_at and _is_frozen(one)}
        self.kept[number] = _Kept(self._held(module), written, _samples(frozen))

    def _held(self, module: torch.nn.Module) -> SavedContents:
        if not self.is_looked_at and not self.changes:
            return NOTHING
        with torch.no_grad(), _disable_current_modes():
            known = SavedContents.now(self._changing())
            return saved_before_step(module).with_earlier(known) if self.is_looked_at else known

    def _changing(self) -> list[tuple[Any, Kind]]:
        changes = [(value, kind) for alive, kind in self.changes.values() if (value := alive()) is not None]
        entries = (one for value, kind in changes if kind.holds for one in kind.inner(kind.save(value)))
        # A call may replace a buffer. The tensor from before the call is then found only in the register.
        return [*((one, TENSOR) for one in entries if isinstance(one, torch.Tensor)), *changes]

    def returned(self, number: int) -> None:
        """Learn what calls change: from the whole state, or from the versions of buffers."""
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
        """Save from now on the buffers that only a later call wrote, as in a discriminator that starts late."""
        written = (self.tensors.get(name) for name, times in self.left.items() if times != before.get(name, times))
        self.changes |= {id(one): (_reference(one), TENSOR) for one in written if one is not None} | self.changes

    def _written(self, kept: _Kept) -> list[str]:
        """Return the buffers and parameters written since."""
        samples = _samples({name: self.tensors[name] for name in kept.samples.keys() & self.tensors.keys()})
        others = {name for name, sample in samples.items() if not _are_same(sample, kept.samples[name])}
        return [
            name
            for name, times in kept.written.items()
            if name in self.tensors and (name in others or times_written(self.tensors[name]) != times)
        ]

    def unheld(self, number: int) -> list[str]:
        """Return the buffers and parameters that were written since a call and not saved."""
        kept = self.kept[number]
        return [
            f"{'parameter' if isinstance(self.tensors[name], torch.nn.Parameter) else 'buffer'} {name}"
            for name in self._written(kept)
            if self.tensors[name] not in kept.held
        ]


def _is_frozen(tensor: torch.Tensor) -> bool:
    """True for a parameter with readable memory that no optimizer trains."""
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


class EarlierStates:
    """The state of modules before each of their recorded calls."""

    def __init__(self) -> None:
        self._roots: MutableMapping[torch.nn.Module, _ModuleHistory] = WeakIdKeyDictionary()

    def begins(self, number: int, module: torch.nn.Module) -> None:
        """Save the state of the module before the call with this number."""
        if module not in self._roots:
            self._roots[module] = _ModuleHistory()
        self._roots[module].begins(number, module)

    def forget(self, number: int, module: torch.nn.Module) -> None:
        """Drop the state of the module before this call."""
        self._roots[module].kept.pop(number, None)

    def returned(self, number: int, module: torch.nn.Module) -> None:
        """Learn from the state after this call what the module changes."""
        if number in self._roots[module].kept:
            self._roots[module].returned(number)

    def is_known(self, number: int) -> bool:
        """True if the state before a call is fully known, except weights that optimizers train."""
        return not any(root.unheld(number) for root in self._roots.values() if number in root.kept)

    def state(self, model: torch.nn.Module, calls: Collection[int]) -> ModelState:
        """Return the model's state before these calls.

        Raises:
            NotReplayableError: a called module wrote a buffer or parameter that was not saved.
        """
        held, unknown = saved_before_step(model), list[str]()
        own = ((root.kept.keys() & {*calls}, root) for root in self._roots.values())
        begun = [(min(numbers), root) for numbers, root in own if numbers]
        for first, root in sorted(begun, key=lambda one: -one[0]):  # the earlier state counts where two overlap
            held = held.with_earlier(root.kept[first].held)
            unheld = root.unheld(first)
            root.calls = 0 if unheld else root.calls  # its next calls are examined whole
            unknown = unheld or unknown
        if unknown:
            raise NotReplayableError(f"it wrote its {unknown[0]}, which ampdbg copies from now on")
        return ModelState(held, model)

    def rewritten(self, state: ModelState, calls: Collection[int]) -> Mapping[str, float]:
        """Return the buffers of a state that the loop wrote right before one of the ``calls``, outside of all calls.
        Each comes with its largest magnitude."""
        found = {
            id(root.tensors.get(name))
            for root in self._roots.values()
            for name, number in root.rewritten.items()
            if number in calls
        }
        before = state.buffers
        those = [(name, before.get(name, one)) for name, one in state.model.named_buffers() if id(one) in found]
        return {name: float(one.abs().amax()) for name, one in those if one.is_floating_point() and one.numel()}

    def poisoned(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        """Yield the names of the buffers that recorded calls made inf or NaN, or replaced by a non-finite one."""
        kept = [one.held for root in self._roots.values() for one in root.kept.values()]
        noted = [(module, root.tensors) for module, root in self._roots.items() if root.kept]
        new = {id(one) for module, old in noted for name, one in module.named_buffers() if old.get(name) is not one}
        for name, buffer in buffers:
            before = [held.copy_of(buffer) for held in kept if buffer in held]
            if (id(buffer) in new or any(map(is_finite, before))) and not is_finite(buffer):
                yield name

    def changing(self, state: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of a state that calls are known to write. Any further buffer may be a mask."""
        changes = {key for root in self._roots.values() for key in root.changes}
        buffers = state.buffers
        for name, buffer in state.model.named_buffers():
            if id(buffer) in changes and name in buffers:
                yield name, buffers[name]


def _reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference if possible: a model must be freed once its loop drops it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
