"""Code that ``torch.compile`` does not follow: ours, which may run in the middle of what a script has compiled.

Only the frames of ours are run as they are: what they call of the script's or of torch's is compiled as it would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import _lru_cache_wrapper as _Cached
from functools import cached_property
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._C import _dynamo as compiler

from ampdbg.source.ownership import AMPDBG

PACKAGE = "ampdbg"

FOLLOWED = ("ampdbg.precision.pins",)
"""A script's model may be pinned by these, and is compiled with them."""

_OURS = (str(AMPDBG), "<string>")
"""The files that our code is of: what a dataclass makes is of none."""

_done = {*FOLLOWED}


def leave_ours_alone() -> None:
    """Has ``torch.compile`` follow none of our code that is there by now.

    torch's own decorators for this import the compiler, which takes seconds; it need not be there.
    """
    skip = _skipping()
    if skip is None:
        return
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == PACKAGE and name not in _done:
            _done.add(name)
            for code in _code_in(module):
                skip(code)


def _skipping() -> Callable[[CodeType], None] | None:
    """What marks code as not to be followed; None in a Python that the compiler does not know."""
    frames: Any = getattr(compiler, "eval_frame", None)
    if hasattr(frames, "skip_code"):  # torch 2.6
        skip: Callable[[CodeType], None] = frames.skip_code
        return skip
    if not hasattr(frames, "_FrameExecStrategy"):
        return None
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    return lambda code: frames.set_code_exec_strategy(code, as_it_is)


def _code_in(owner: ModuleType | type) -> Iterator[CodeType]:
    """The code of the functions that a module or a class defines, with what is defined within them."""
    name = owner.__module__ if isinstance(owner, type) else owner.__name__
    for value in [*vars(owner).values()]:
        if isinstance(value, type) and value.__module__ == name and value is not owner:
            yield from _code_in(value)
        for function in _functions_of(value):
            if function.__module__ == name and function.__code__.co_filename.startswith(_OURS):
                yield from _with_inner(function.__code__)


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """A function, those in a table of them, and what stands behind a descriptor or a decorator, maybe of torch's."""
    if isinstance(value, FunctionType):
        yield value
    behind = value.values() if isinstance(value, dict) else _BEHIND.get(type(value), lambda _: ())(value)
    for function in [*behind]:
        yield from _functions_of(function)


_BEHIND: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    property: attrgetter("fget", "fset"),
    cached_property: lambda descriptor: (descriptor.func,),
    **dict.fromkeys((staticmethod, classmethod), lambda descriptor: (descriptor.__func__,)),
    **dict.fromkeys((FunctionType, _Cached), lambda function: (getattr(function, "__wrapped__", None),)),
}


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
