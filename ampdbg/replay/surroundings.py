"""What a forward pass may change beside the model: globals, attributes and closures of the user's own modules.

A counter of calls, a list that losses are appended to, a running mean, a generator of random numbers. They are restored
one by one, and hardly further than their own contents: a global may lead to the whole data set and program. What other
threads of the user's may use meanwhile, such as a prefetcher's queue, is theirs and left alone, and so is what the
handlers of signals name.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ampdbg.replay.state import CONSTANTS, LARGEST_APART, MOST, OBJECT, Kinds, Restore
from ampdbg.source.ownership import is_users_file

CONTAINERS, PYTHONS = (dict, list, set, deque), ("builtins", "collections")
METHODS = (staticmethod, classmethod, MethodType)
JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
WAITS = ("join", "_wait_for_tstate_lock", "_shutdown")
"""Where a thread stands, in Python's ``threading``, that waits for another to end."""


@contextlib.contextmanager
def surroundings_restored() -> Iterator[None]:
    """Afterwards these are what they were, whatever was done to them, but for what other threads may have done."""
    spaces = list(_spaces())
    shared = _names_of_others(spaces)
    with torch.no_grad():
        undo = [restore for space in spaces for restore in _saved(space, shared)]
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in undo:
                with contextlib.suppress(Exception):  # the user's own may refuse; the rest is restored all the same
                    restore()


_is_users_file = functools.lru_cache(maxsize=None)(is_users_file)  # asked of every module, for every replay


def _spaces() -> Iterator[Any]:
    """Each of the user's modules, the classes in it, and the objects in it that are of the user's own classes."""
    kinds = Kinds()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if type(module) is ModuleType and isinstance(file, str) and _is_users_file(file):
            yield module
            for value in list(vars(module).values()):
                is_class = isinstance(value, type)
                is_object = not is_class and kinds[type(value)] is OBJECT and type(value).__dictoffset__ != 0
                if (is_class and value.__module__ == module.__name__) or (is_object and _is_of_users_class(value)):
                    yield value


def _is_of_users_class(value: Any) -> bool:
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_users_file(file)


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


def _names_of_others(spaces: Sequence[Any]) -> set[str]:
    """The globals and attributes that may be used meanwhile by the user's code in other threads and signals' handlers.

    They are known by name alone: what the functions on the stacks of those threads name from where they are, and what
    functions of these names do in their turn.
    """
    found = {name for frame in _frames_of_others() for name in _names_ahead(frame)}
    handlers = filter(None, map(_code_of, map(signal.getsignal, signal.valid_signals())))
    found |= {name for code in handlers if _is_users_file(code.co_filename) for name in _names(code)}
    functions: dict[str, list[CodeType]] = {}
    for space in spaces if found else ():
        for name, value in list(vars(space).items()):
            if (code := _code_of(value)) is not None:
                functions.setdefault(name, []).append(code)
    names = set[str]()
    while found:
        names |= found
        called = [code for name in found for code in functions.pop(name, ())]
        found = {name for code in called for name in _names(code)} - names
    return names


def _frames_of_others() -> Iterator[FrameType]:
    """The user's frames of all threads but this one and those that wait for a thread to end."""
    for thread, innermost in sys._current_frames().items():
        is_waiting = innermost.f_code.co_name in WAITS and innermost.f_globals.get("__name__") == threading.__name__
        frame: FrameType | None = None if is_waiting or thread == threading.get_ident() else innermost
        while frame is not None:
            if _is_users_file(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back


def _code_of(value: Any) -> CodeType | None:
    function = getattr(value, "__func__", None) if isinstance(value, METHODS) else value
    return inspect.unwrap(function).__code__ if isinstance(function, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that a function names, with those that are defined in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _names_ahead(frame: FrameType) -> set[str]:
    """Those that it names from where it is: in the loop around that, and behind."""
    code, here = frame.f_code, frame.f_lasti
    steps = list(dis.get_instructions(code))
    back = [step.argval for step in steps if step.opcode in JUMPS and step.offset >= here > step.argval]
    start = min([here, *back])
    inner = () if code.co_name == "<module>" else filter(lambda one: isinstance(one, CodeType), code.co_consts)
    names = {str(step.argval) for step in steps if step.opcode in dis.hasname and step.offset >= start}
    return names.union(*(_names(one) for one in inner))


def _numpys() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
