"""Setting an attribute for a while, and putting back exactly what was there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_MISSING = object()


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets ``owner.name`` to ``value``; what is returned undoes it, when it is called and not before."""
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)

    def undo() -> None:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets ``owner.name`` to ``value``; afterwards an attribute that was inherited is inherited again."""
    undo = replace(owner, name, value)
    try:
        yield
    finally:
        undo()
