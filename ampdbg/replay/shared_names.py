"""What of the user's code other threads and the handlers of signals may use while a step is run again, by its names.

A prefetcher goes on to fill its queue, and a handler may set a flag: what they have written meanwhile is theirs, and is
not to be taken back.
"""

from __future__ import annotations

import dis
import functools
import inspect
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from ampdbg.source.ownership import is_users_file

METHODS = (staticmethod, classmethod, MethodType)
JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
WAITS = ("join", "_wait_for_tstate_lock", "_shutdown")
"""Where a thread stands, in Python's ``threading``, that waits for another to end."""

is_known_users = functools.lru_cache(maxsize=None)(is_users_file)
"""The same, remembered: it is asked of every module, for every replay."""


def shared_names(spaces: Sequence[Any]) -> set[str]:
    """The globals and attributes that may be used meanwhile by the user's code in other threads and signals' handlers.

    They are known by name alone: what the functions on the stacks of those threads name from where they are, and what
    functions of these names do in their turn.
    """
    found = {name for frame in _frames_of_others() for name in _names_ahead(frame)}
    handlers = filter(None, map(_code_of, map(signal.getsignal, signal.valid_signals())))
    found |= {name for code in handlers if is_known_users(code.co_filename) for name in _names(code)}
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
            if is_known_users(frame.f_code.co_filename):
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
