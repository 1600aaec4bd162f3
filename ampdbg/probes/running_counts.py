"""Counts that a model keeps in half: scalars that each write raises by the same amount.

Half holds such a count only up to a limit: 256 in bfloat16 for steps of 1, because 256 + 1 rounds to 256. The half
scalars of the modules are copied after optimizer steps. No copy is read before the record is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from ampdbg.probes.models import Models
from ampdbg.probes.seams import is_captured
from ampdbg.probes.tensors import HALVES
from ampdbg.record.run import HalfCount

EARLY = 8
"""The step of a count is known from the first optimizer steps, of which there are this many."""

LEAST_EQUAL = 3
"""At least this many early steps must be equal, and more than half of them. Fewer may be chance."""

EQUAL = 0.05
"""Steps are equal if they differ by at most this share: half rounds each sum."""


class CopiedScalar(NamedTuple):
    """The value of a scalar after an optimizer step, and how often it was written until then: ``steps`` counts the
    optimizer steps with a write, and ``writes`` every write. A replay of a step writes too."""

    steps: int
    writes: int
    value: Any


class FollowedScalar:
    """A half scalar of a module, copied after each optimizer step.

    Attributes:
        copies: The copies after the first steps, and the latest.
    """

    def __init__(self, name: str, owner: nn.Module, attribute: str, value: torch.Tensor) -> None:
        self.name, self._attribute = name, attribute
        self._owner, self._value, self._version = weakref.ref(owner), weakref.ref(value), value._version
        self.copies = [CopiedScalar(0, 0, value.detach().clone())]

    def look(self) -> None:
        """Copy the value, and count the writes since the last look. A new tensor counts as one write."""
        value, last = getattr(self._owner(), self._attribute, None), self.copies[-1]
        if is_half_scalar(value):
            writes = value._version - self._version if value is self._value() else 1
            self._value, self._version = weakref.ref(value), value._version
            now = CopiedScalar(last.steps + (writes > 0), last.writes + writes, value.detach().clone())
            self.copies[EARLY:] = [now]

    @property
    def is_written(self) -> bool:
        return self.copies[-1].writes > 0

    @property
    def count(self) -> Iterator[HalfCount]:
        """Yield the count, if the early steps are equal and above zero. On a GPU this syncs."""
        seen = [copy._replace(value=float(copy.value)) for copy in self.copies]
        written = [(now, then) for then, now in pairwise(seen[:EARLY]) if now.writes > then.writes]
        added = [(now.value - then.value) / (now.writes - then.writes) for now, then in written]
        step = median(added or [0.0])
        equal = [one for one in added if abs(one - step) <= EQUAL * step]
        if step > 0.0 and len(equal) >= max(LEAST_EQUAL, len(added) // 2 + 1):
            each = median(now.value - then.value for now, then in written)
            dtype = str(self.copies[0].value.dtype).removeprefix("torch.")
            yield HalfCount(self.name, dtype, step, seen[-1].value, seen[0].value + each * seen[-1].steps)


class RunningCounts:
    """The half scalars of a loop's modules that its forward passes write."""

    def __init__(self, models: Models) -> None:
        self._models, self._steps = models, 0
        self._scalars: list[FollowedScalar] = []

    def after_step(self) -> None:
        """Look at the scalars; call this after each optimizer step. Those that no early step writes are dropped."""
        if is_captured():
            return
        self._scalars = self._scalars if self._steps else [*self._found()]
        self._steps += 1
        for scalar in self._scalars:
            scalar.look()
        if self._steps == EARLY:
            self._scalars = [one for one in self._scalars if one.is_written]

    def _found(self) -> Iterator[FollowedScalar]:
        for path, module in self._models.named_modules():
            for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
                if is_half_scalar(value):
                    yield FollowedScalar(f"{path}.{name}".lstrip("."), module, name, value)

    @property
    def seen(self) -> tuple[HalfCount, ...]:
        return tuple(count for scalar in self._scalars for count in scalar.count)


def is_half_scalar(value: object) -> TypeGuard[torch.Tensor]:
    """True for a half tensor of one value that is not a parameter. For inference tensors torch counts no writes, and
    to read a subclass such as DTensor may need other processes."""
    if type(value) is not torch.Tensor or value.dtype not in HALVES:
        return False
    return value.numel() == 1 and not (value.requires_grad or value.is_meta or value.is_inference())
