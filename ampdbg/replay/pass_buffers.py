"""The buffers that a pass computes with, as they were when it began: it may write them itself, with inf or NaN too."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.nn.modules.batchnorm import _NormBase

from ampdbg.probes.tensors import nonfinite, times_written
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import duplicated

COPIED_AT_FIRST = 16
"""In so many passes every buffer is copied: by then it is known which ones forward passes write."""


def is_computed_with(module: torch.nn.Module) -> bool:
    """Whether a pass that trains computes with the module's own buffers; a batch norm only writes them."""
    return not isinstance(module, _NormBase)


@dataclass(frozen=True)
class _Buffer:
    """A buffer as it was: ``times`` that it had been written, and its ``copy``, where there is one."""

    owner: weakref.ref[torch.nn.Module]
    key: str
    tensor: torch.Tensor
    times: int
    copy: torch.Tensor | None

    def is_written(self, *, looks: bool) -> bool:
        """Whether the pass has written it. torch does not count what writes into its ``.data``: ``looks`` compares."""
        owner = self.owner()
        is_same = owner is not None and owner._buffers.get(self.key) is self.tensor
        if not is_same or times_written(self.tensor) != self.times:
            return True
        return looks and self.copy is not None and not torch.equal(self.copy, self.tensor)

    @property
    def contents(self) -> torch.Tensor | None:
        """What it held; None where that is gone."""
        if self.copy is not None:
            return self.copy
        return self.tensor if times_written(self.tensor) == self.times else None

    @property
    def was_finite(self) -> bool:
        return self.contents is not None and not any(nonfinite([(self.key, self.contents)]))


class PassBuffers:
    """The buffers of called modules as they were when a pass began, which the pass itself may have written since.

    Those of batch norms are left out: to train is to write them, and not to compute with them. Nearly always there are
    no others that a pass writes, and nothing is copied.
    """

    def __init__(self) -> None:
        self._slots: dict[int, tuple[weakref.ref[torch.nn.Module], list[tuple[weakref.ref[torch.nn.Module], str]]]] = {}
        self._before: dict[tuple[int, str], _Buffer] = {}
        self._written: set[tuple[int, str]] = set()
        self._passes = 0

    def forget(self) -> None:
        """Lets go of those of the last pass; another one begins."""
        if self._before:
            # Elsewhere than on a CPU to look is to sync: that is done once.
            is_last = self._passes == COPIED_AT_FIRST - 1
            for slot, before in self._before.items():
                looks = self._passes < COPIED_AT_FIRST and (before.tensor.is_cpu or is_last)
                with contextlib.suppress(Exception):  # a class of the user's own may raise anything
                    self._written |= {slot} if before.is_written(looks=looks) else set()
            self._before = {}
        self._passes += 1

    def note(self, module: torch.nn.Module) -> None:
        """Notes those of a module that is about to be called, unless that was called in the same pass before."""
        for alive, key in self._of(module):
            owner = alive()
            buffer = None if owner is None else owner._buffers.get(key)
            slot = id(owner), key
            if buffer is None or slot in self._before:
                continue
            copied = None
            if self._passes < COPIED_AT_FIRST or slot in self._written:
                with contextlib.suppress(Exception), torch.no_grad():  # a class of the user's own may raise anything
                    copied = duplicated(buffer)
            self._before[slot] = _Buffer(alive, key, buffer, times_written(buffer), copied)

    def state(self, model: torch.nn.Module) -> ModelState | None:
        """The model's state of now, with the buffers from before the pass; None where one of them is not known."""
        state = ModelState.now(model)
        buffers = dict(state.buffers)
        for name, module in model.named_modules():
            for key in module._buffers:
                before = self._before.get((id(module), key))
                if before is None or (before.copy is None and not before.is_written(looks=False)):
                    continue
                if before.contents is None:
                    return None
                buffers[f"{name}.{key}".lstrip(".")] = before.contents
        return replace(state, buffers=buffers)

    def poisoned(self, modules: Iterable[tuple[str, torch.nn.Module]], *, statistics: bool) -> set[str]:
        """The buffers, by name, that the pass has made inf or NaN; with the ``statistics`` of batch norms, or without.

        What batch norms that train held before is not known: such statistics count as made so.
        """
        found = set()
        for name, module in modules:
            for key, _ in nonfinite(module.named_buffers(recurse=False)):
                before = self._before.get((id(module), key))
                is_made = before is not None and before.was_finite
                if is_made or (statistics and module.training and not is_computed_with(module)):
                    found.add(f"{name}.{key}".lstrip("."))
        return found

    def _of(self, module: torch.nn.Module) -> list[tuple[weakref.ref[torch.nn.Module], str]]:
        known, slots = self._slots.get(id(module), (None, []))
        if known is None or known() is not module:
            inner = [one for one in module.modules() if is_computed_with(one)]
            slots = [(weakref.ref(one), key) for one in inner for key in one._buffers]
            self._slots[id(module)] = weakref.ref(module), slots
        return slots
