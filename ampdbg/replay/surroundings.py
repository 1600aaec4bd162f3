"""What a forward pass may change beside the model: globals and class attributes of the user's own modules.

A counter of calls, a list that losses are appended to, a generator of random numbers. They are restored one by one,
and no further than their own contents: a global may lead to the whole data set and the whole program.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from ampdbg.replay.state import CONSTANTS, MOST, Kinds, Restore
from ampdbg.source.ownership import is_users_file

CONTAINERS = (dict, list, set, deque)


@contextlib.contextmanager
def surroundings_restored() -> Iterator[None]:
    """Afterwards these are what they were, whatever was done to them."""
    undo = [restore for space in _spaces() for restore in _saved(space)]
    try:
        yield
    finally:
        for restore in undo:
            with contextlib.suppress(Exception):  # the user's own may refuse; the rest is restored all the same
                restore()


_is_users_file = functools.lru_cache(maxsize=None)(is_users_file)  # asked of every module, for every replay


def _spaces() -> Iterator[ModuleType | type]:
    """Each of the user's modules, and the classes in it."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if type(module) is ModuleType and isinstance(file, str) and _is_users_file(file):
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == module.__name__:
                    yield value


def _saved(space: ModuleType | type) -> Iterator[Restore]:
    kinds = Kinds()
    generators = (torch._C.Generator, random.Random, *_numpys())
    for name, value in list(vars(space).items()):
        if name.startswith("__"):
            continue
        kind = None
        if isinstance(value, generators) or (type(value) in CONTAINERS and len(value) <= MOST):
            kind = kinds[type(value)]
        if type(value) in CONSTANTS or kind is not None:
            yield functools.partial(_bind, space, name, value)
        if kind is not None:
            with contextlib.suppress(Exception):
                yield kind.save(value)


def _bind(space: ModuleType | type, name: str, value: Any) -> None:
    """Gives a name its value again, where it has another."""
    if vars(space).get(name) is not value:
        setattr(space, name, value)


def _numpys() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
