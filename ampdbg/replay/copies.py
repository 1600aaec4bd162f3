"""Copies of a batch or of a model's attributes: rebuilt containers with new tensors in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ampdbg.precision.widening import Alteration
from ampdbg.replay.state import CONSTANTS, OBJECT, OBJECTS_IN_A_BATCH, Kinds, duplicated


def altered_batch(batch: Any, alter: Alteration) -> Any:
    """Return a copy of the batch with altered tensors; the original stays unchanged.

    A tensor that requires a gradient becomes a leaf that requires a gradient. If its graph included the alteration, the
    gradient would be cast back to the dtype that the replay has replaced.
    """

    def altered(value: Any) -> Any:
        other = alter(value) if isinstance(value, torch.Tensor) else value
        return other if other is value else other.requires_grad_(value.requires_grad)

    with torch.no_grad():
        return Copying(altered).of(batch)


def duplicate(batch: Any) -> Any:
    """Return a copy of a batch with its own tensors, arrays and containers. Share the objects that cannot be copied."""
    with torch.no_grad():
        return Copying(_duplicate_of_leaf).of(batch)


def _duplicate_of_leaf(value: Any) -> Any:
    with contextlib.suppress(Exception):  # values that cannot be copied are shared
        return duplicated(value).requires_grad_(value.requires_grad)
    return value


class Copying:
    """Rebuilds values: each container is built again from the changed values in it.

    Shared values stay shared. ``change`` returns the replacement for a tensor, and for an object that cannot be
    rebuilt.
    """

    _kinds = Kinds()  # shared: each call of a loop is copied, and to look up the kinds takes as long as the rest

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._objects = 0
        self._met: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return the copy of a value."""
        if type(value) in CONSTANTS:
            return value
        if id(value) not in self._met:
            self._met[id(value)] = value, _UNDER_WAY
            self._met[id(value)] = value, self._made(value)
        made = self._met[id(value)][1]
        return self._change(value) if made is _UNDER_WAY else made  # the value contains itself

    def _made(self, value: Any) -> Any:
        kind = self._kinds[type(value)]
        if kind is None or kind.make is None or (kind is OBJECT and self._objects == OBJECTS_IN_A_BATCH):
            return self._change(value)
        self._objects += kind is OBJECT
        try:
            contents = _asked(kind.save, value)
            return _asked(kind.make, value, self._each(contents) if kind.holds else contents)
        except (_CannotError, RecursionError):  # too deeply nested to rebuild
            return self._change(value)
        finally:
            self._objects -= kind is OBJECT

    def _each(self, entries: Any) -> Any:
        if isinstance(entries, dict):
            return {name: self.of(one) for name, one in entries.items()}
        return [self.of(one) for one in entries]


_UNDER_WAY = object()


class _CannotError(Exception):
    """A user's class cannot return its contents, or cannot be rebuilt."""


def _asked(ask: Callable[..., Any], *given: Any) -> Any:
    try:
        return ask(*given)
    except Exception as error:  # the class may raise anything
        raise _CannotError from error
