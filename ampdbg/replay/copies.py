"""Copies of what a batch or a model's attributes hold: containers made anew, with other tensors in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ampdbg.precision.widening import Alteration
from ampdbg.replay.state import CONSTANTS, OBJECT, OBJECTS_IN_A_BATCH, Kinds, duplicated


def altered_batch(batch: Any, alter: Alteration) -> Any:
    """The batch with its tensors altered; the one that was given is left as it is.

    A tensor that needs a gradient becomes a leaf that needs one: were the alteration part of the graph, a cast to
    another dtype would lead the gradient back to the dtype that the replay has lifted.
    """

    def altered(value: Any) -> Any:
        other = alter(value) if isinstance(value, torch.Tensor) else value
        return other if other is value else other.requires_grad_(value.requires_grad)

    with torch.no_grad():
        return Copying(altered).of(batch)


def duplicate(batch: Any) -> Any:
    """A batch with tensors, arrays and containers of its own; other objects that cannot be copied are shared."""
    with torch.no_grad():
        return Copying(_duplicate_of_leaf).of(batch)


def _duplicate_of_leaf(value: Any) -> Any:
    with contextlib.suppress(Exception):  # what cannot be copied is shared, and what is no tensor
        return duplicated(value).requires_grad_(value.requires_grad)
    return value


class Copying:
    """Makes values again, each container anew of what ``change`` makes of the values in it.

    What two containers share stays shared. ``change`` is asked what a tensor becomes, and an object that cannot be made
    again.
    """

    _kinds = Kinds()  # each call of a loop is copied: to ask every class anew takes as long as the rest

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._objects = 0
        self._met: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """What the value becomes."""
        if type(value) in CONSTANTS:
            return value
        if id(value) not in self._met:
            self._met[id(value)] = value, _UNDER_WAY
            self._met[id(value)] = value, self._made(value)
        made = self._met[id(value)][1]
        return self._change(value) if made is _UNDER_WAY else made  # which holds itself

    def _made(self, value: Any) -> Any:
        kind = self._kinds[type(value)]
        if kind is None or kind.make is None or (kind is OBJECT and self._objects == OBJECTS_IN_A_BATCH):
            return self._change(value)
        self._objects += kind is OBJECT
        try:
            contents = _asked(kind.save, value)
            return _asked(kind.make, value, self._each(contents) if kind.holds else contents)
        except (_CannotError, RecursionError):  # nested too deeply to be made again
            return self._change(value)
        finally:
            self._objects -= kind is OBJECT

    def _each(self, entries: Any) -> Any:
        if isinstance(entries, dict):
            return {name: self.of(one) for name, one in entries.items()}
        return [self.of(one) for one in entries]


_UNDER_WAY = object()


class _CannotError(Exception):
    """A class of the user's own cannot be asked what it holds, or be made again."""


def _asked(ask: Callable[..., Any], *given: Any) -> Any:
    try:
        return ask(*given)
    except Exception as error:  # whatever the class raises
        raise _CannotError from error
