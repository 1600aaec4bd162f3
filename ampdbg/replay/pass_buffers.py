"""The buffers that a pass computes with, as they were when it began: it may write them itself, with inf or NaN too."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.probes.tensors import Scalar, nonfinite, times_written, to_host
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import duplicated

COPIED_AT_FIRST = 16
"""In so many passes every buffer is copied: by then it is known which ones forward passes write."""


def is_computed_with(module: torch.nn.Module) -> bool:
    """Whether a pass that trains computes with the module's own buffers; a batch norm only writes them."""
    return not isinstance(module, _NormBase)


@dataclass(frozen=True)
class _Buffer:
    """A buffer as a ``call`` found it: the ``times`` that it had been written, and its ``copy``, where there is one."""

    call: int
    owner: weakref.ref[torch.nn.Module]
    key: str
    tensor: torch.Tensor
    times: int
    copy: torch.Tensor | None

    @property
    def is_written(self) -> bool:
        """Whether it has been written since, but for what torch does not count."""
        owner = self.owner()
        is_same = owner is not None and owner._buffers.get(self.key) is self.tensor
        return not is_same or times_written(self.tensor) != self.times

    def differs(self) -> Scalar:
        """1 where it holds other values than its copy, or where none compares them; else 0. Not synced.

        torch does not count what writes into the ``.data`` of a tensor.
        """
        try:
            return 0.0 if self.copy is None else (self.copy != self.tensor).any()
        except Exception:  # noqa: BLE001 - sparse, nested, or a class of the user's own, which may raise anything
            return 1.0

    @property
    def contents(self) -> torch.Tensor | None:
        """What it held; None where that is gone."""
        if self.copy is not None:
            return self.copy
        return self.tensor if times_written(self.tensor) == self.times else None

    @property
    def was_finite(self) -> bool:
        """Whether it is known to have been."""
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
        self.keep(())
        self._passes += 1

    def keep(self, calls: Container[int]) -> None:
        """Lets go of what was noted for other calls than these. On a GPU this syncs, in the first passes alone."""
        gone = {slot: before for slot, before in self._before.items() if before.call not in calls}
        if not gone:
            return
        self._before = {slot: before for slot, before in self._before.items() if slot not in gone}
        self._written |= {slot for slot, before in gone.items() if before.is_written}
        if self._passes < COPIED_AT_FIRST:
            with _disable_current_modes():
                differ = to_host([before.differs() for before in gone.values()])
            self._written |= {slot for slot, is_other in zip(gone, differ, strict=True) if is_other}

    def note(self, call: int, module: torch.nn.Module) -> None:
        """Notes those of a module that is about to be called, unless they are noted for an earlier call."""
        for alive, key in self._of(module):
            owner = alive()
            buffer = None if owner is None else owner._buffers.get(key)
            slot = id(owner), key
            if buffer is None or slot in self._before:
                continue
            copied = None
            if self._passes < COPIED_AT_FIRST or slot in self._written:
                # A class of the user's own may raise anything.
                with contextlib.suppress(Exception), torch.no_grad(), _disable_current_modes():
                    copied = duplicated(buffer)
            self._before[slot] = _Buffer(call, alive, key, buffer, times_written(buffer), copied)

    def state(self, model: torch.nn.Module) -> ModelState | None:
        """The model's state of now, with the buffers from before the pass; None where one of them is not known."""
        state = ModelState.now(model)
        buffers = dict(state.buffers)
        for name, module in model.named_modules():
            for key, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                before = self._before.get((id(module), key))
                if before is None or (before.copy is None and not before.is_written):
                    continue
                if before.contents is None:
                    return None
                buffers[f"{name}.{key}".lstrip(".")] = before.contents
        return replace(state, buffers=buffers)

    def were_spoilt(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[str]:
        """The names of the buffers that held inf or NaN when the pass began, of those that passes write: masks stay as
        they are."""
        for name, module in modules:
            for key in module._buffers:
                before = self._before.get((id(module), key))
                contents = None if before is None or (id(module), key) not in self._written else before.contents
                if contents is not None and any(nonfinite([(key, contents)])):
                    yield f"{name}.{key}".lstrip(".")

    def poisoned(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module]]:
        """The buffers that the pass has made inf or NaN: by name, with the modules that own them.

        What batch norms that train held before is not known: their statistics count as made so.
        """
        for name, module in modules:
            for key, _ in nonfinite(module.named_buffers(recurse=False)):
                before = self._before.get((id(module), key))
                is_statistic = module.training and not is_computed_with(module)
                if is_statistic or (before is not None and before.was_finite):
                    yield f"{name}.{key}".lstrip("."), module

    def _of(self, module: torch.nn.Module) -> list[tuple[weakref.ref[torch.nn.Module], str]]:
        known, slots = self._slots.get(id(module), (None, []))
        if known is None or known() is not module:
            inner = [one for one in module.modules() if is_computed_with(one)]
            slots = [
                (weakref.ref(one), key)
                for one in inner
                for key, _ in one.named_buffers(recurse=False, remove_duplicate=False)
            ]
            self._slots[id(module)] = weakref.ref(module), slots
        return slots
