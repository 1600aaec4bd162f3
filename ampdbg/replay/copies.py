"""Copies of what a batch or a model's attributes hold: containers made anew, with other tensors in them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampdbg.precision.widening import Alteration
from ampdbg.replay.state import CONSTANTS, LARGEST, MOST, OBJECT, OBJECTS_IN_A_BATCH, Kinds, duplicated


def altered_batch(batch: Any, alter: Alteration) -> Any:
    """The batch with its tensors altered; the one that was given is left as it is.

    A tensor that needs a gradient becomes a leaf that needs one: were the alteration part of the graph, a cast to
    another dtype would lead the gradient back to the dtype that the replay has lifted.
    """
    with torch.no_grad():
        return Copying(lambda value: _altered_leaf(value, alter) if isinstance(value, torch.Tensor) else value).of(
            batch
        )


def _altered_leaf(tensor: torch.Tensor, alter: Alteration) -> torch.Tensor:
    other = alter(tensor)
    return other if other is tensor else other.requires_grad_(tensor.requires_grad)


def duplicate(batch: Any) -> Any:
    """A batch with tensors, arrays and containers of its own; other objects that cannot be copied are shared."""
    with torch.no_grad():
        return Copying(_duplicate_of_leaf).of(batch)


class Left(enum.Enum):
    """In the place of a value that is no plain data: a replay starts with what the model holds by then."""

    AS_IT_IS = "as it is"


class Copying:
    """Makes values again, each container anew of what ``change`` makes of the values in it.

    What two containers share stays shared. With ``strict`` a container that holds an object that cannot be made
    again is ``Left`` as a whole, and so is one that is large.
    """

    def __init__(self, change: Callable[[Any], Any], *, strict: bool = False) -> None:
        self._change = change
        self._strict = strict
        self._kinds = Kinds()
        self._objects = 0
        self._met: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """What the value becomes."""
        cls = type(value)
        if cls in CONSTANTS or cls is Left:
            return value
        if id(value) not in self._met:
            self._met[id(value)] = value, Left.AS_IT_IS if self._strict else value  # should it hold itself
            self._met[id(value)] = value, self._made(value)
        return self._met[id(value)][1]

    def each(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What each of the values becomes."""
        return {name: value if type(value) in CONSTANTS else self.of(value) for name, value in values.items()}

    def _made(self, value: Any) -> Any:
        kind = self._kinds[type(value)]
        if kind is None or kind.make is None:
            return self._change(value)
        if kind is OBJECT and (self._strict or self._objects == OBJECTS_IN_A_BATCH or not hasattr(value, "__dict__")):
            return self._change(value)
        if self._strict and not _is_small_and_plain(value):
            return Left.AS_IT_IS
        self._objects += kind is OBJECT
        try:
            inner = [self.of(one) for one in kind.inner(value)]
        except RecursionError:  # nested too deeply to be made again
            return Left.AS_IT_IS if self._strict else value
        finally:
            self._objects -= kind is OBJECT
        if any(one is Left.AS_IT_IS for one in inner):
            return Left.AS_IT_IS
        try:
            return kind.make(value, inner)
        except Exception:  # noqa: BLE001 - a class of the user's own may not be made again
            return Left.AS_IT_IS if self._strict else value


def _is_small_and_plain(value: Any) -> bool:
    # Asked of its type: a class of the user's own may look its attributes up in a dict, and raise what that does.
    if hasattr(type(value), "nbytes"):
        return value.nbytes <= LARGEST and not value.dtype.hasobject
    if isinstance(value, dict) and not all(map(_is_constant, value)):
        return False
    return not hasattr(type(value), "__len__") or len(value) <= MOST


def _is_constant(key: Any) -> bool:
    return type(key) in CONSTANTS or (type(key) is tuple and all(map(_is_constant, key)))


def _duplicate_of_leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return duplicated(value).requires_grad_(value.requires_grad)
    except Exception:  # noqa: BLE001 - what cannot be copied is shared
        return value
