"""What a forward pass may change beside the model: globals, attributes and closures of the user's own modules.

A counter of calls, a list that losses are appended to, a running mean, a generator of random numbers. They are restored
one by one, and hardly further than their own contents: a global may lead to the whole data set and program. What
others may use meanwhile is left alone: see :mod:`ampdbg.replay.shared_names`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from ampdbg.replay.shared_names import is_known_users, shared_names
from ampdbg.replay.state import CONSTANTS, LARGEST_APART, MOST, OBJECT, Kinds, Restore

CONTAINERS, PYTHONS = (dict, list, set, deque), ("builtins", "collections")


@contextlib.contextmanager
def surroundings_restored() -> Iterator[None]:
    """Afterwards these are what they were, whatever was done to them, but for what other threads may have done."""
    spaces = list(_spaces())
    shared = shared_names(spaces)
    with torch.no_grad():
        undo = [restore for space in spaces for restore in _saved(space, shared)]
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in undo:
                with contextlib.suppress(Exception):  # the user's own may refuse; the rest is restored all the same
                    restore()


def _spaces() -> Iterator[Any]:
    """Each of the user's modules, the classes in it, and the objects in it that are of the user's own classes."""
    kinds = Kinds()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if type(module) is ModuleType and isinstance(file, str) and is_known_users(file):
            yield module
            for value in list(vars(module).values()):
                is_class = isinstance(value, type)
                is_object = not is_class and kinds[type(value)] is OBJECT and type(value).__dictoffset__ != 0
                if (is_class and value.__module__ == module.__name__) or (is_object and _is_of_users_class(value)):
                    yield value


def _is_of_users_class(value: Any) -> bool:
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_known_users(file)


def _saved(space: Any, shared: Collection[str]) -> Iterator[Restore]:
    for name, value in list(vars(space).items()):
        if name.startswith("__") or name in shared:
            continue
        contents = list(_contents_saved(value))
        if type(value) in CONSTANTS or contents:
            yield functools.partial(_bind, space, name, value)
        yield from contents
        if isinstance(value, FunctionType):
            yield from _closure_saved(value, shared)


def _closure_saved(function: FunctionType, shared: Collection[str]) -> Iterator[Restore]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            value = cell.cell_contents
            contents = list(_contents_saved(value)) if name not in shared else []
            if contents or (type(value) in CONSTANTS and name not in shared):
                yield functools.partial(setattr, cell, "cell_contents", value)
            yield from contents


def _contents_saved(value: Any) -> Iterator[Restore]:
    """What restores the contents of a generator, a small container with the generators in it, or a small tensor."""
    generators = (torch._C.Generator, random.Random, *_numpys())
    is_container = isinstance(value, CONTAINERS) and type(value).__module__ in PYTHONS and len(value) <= MOST
    is_tensor = isinstance(value, torch.Tensor) and value.numel() * value.element_size() <= LARGEST_APART
    if is_container or is_tensor or isinstance(value, generators):
        kind = Kinds()[type(value)]
        assert kind is not None
        with contextlib.suppress(Exception):  # it may be of a class whose values cannot be copied
            yield kind.save(value)
        if is_container:
            for one in kind.inner(value):
                if isinstance(one, generators):
                    yield from _contents_saved(one)


def _bind(space: Any, name: str, value: Any) -> None:
    """Gives a name its value again, where it has another."""
    if vars(space).get(name) is value:
        return
    if isinstance(space, type):
        setattr(space, name, value)
    else:
        vars(space)[name] = value  # whatever the object itself does where an attribute is set


def _numpys() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
