"""Excludes ampdbg's code from ``torch.compile``, because it may run inside a script's compiled code.

Only ampdbg's own frames run uncompiled. The script's and torch's functions that they call are compiled as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from functools import _lru_cache_wrapper as _Cached
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch._C import _dynamo as compiler

from ampdbg.source.ownership import AMPDBG, codes_within

PACKAGE = "ampdbg"

_Function = TypeVar("_Function", bound=Callable[..., Any])

FOLLOWED = ("ampdbg.precision.pins",)
"""Modules with pins that become part of a script's model, so they are compiled with the model."""

HOLDERS: Mapping[type, tuple[str, ...]] = {
    FunctionType: ("__wrapped__", "__defaults__", "__kwdefaults__"),
    _Cached: ("__wrapped__",),
    property: ("fget", "fset"),
    cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    Field: ("default_factory",),
}
"""The attributes in which functions, descriptors and dataclass fields hold functions."""

_OURS = (str(AMPDBG), "<string>")
"""The files of ampdbg's code. The methods that a dataclass generates have the file "<string>"."""

_done = {*FOLLOWED}


def uncompiled(function: _Function) -> _Function:
    """Decorate a function that compiled code calls and that must run then, such as a hook of an optimizer's step.

    Torch's own decorator for this imports the compiler.
    """
    vars(function)["_torchdynamo_disable"] = True
    return function


def exclude_from_compile() -> None:
    """Exclude all ampdbg code loaded so far from ``torch.compile``.

    Torch's own decorators for this import the compiler, which takes seconds and may not be installed.
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
    """Return the function that excludes code from compilation, or None if the compiler does not support this Python."""
    frames: Any = getattr(compiler, "eval_frame", None)
    if hasattr(frames, "skip_code"):  # torch 2.6
        skip: Callable[[CodeType], None] = frames.skip_code
        return skip
    if not hasattr(frames, "_FrameExecStrategy"):
        return None
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    return lambda code: frames.set_code_exec_strategy(code, as_it_is)


def _code_in(owner: ModuleType | type) -> Iterator[CodeType]:
    """Yield the code of the functions that a module or a class defines, with their inner functions."""
    name = owner.__module__ if isinstance(owner, type) else owner.__name__
    for value in [*vars(owner).values()]:
        if isinstance(value, type) and value.__module__ == name and value is not owner:
            yield from _code_in(value)
        for function in _functions_of(value):
            if function.__module__ == name and function.__code__.co_filename.startswith(_OURS):
                yield from codes_within(function.__code__)


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that a value is or holds; a dict, a tuple or a type in ``HOLDERS`` may hold torch's too."""
    if isinstance(value, FunctionType):
        yield value
    tabled = [*value.values()] if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    names = next((names for kind, names in HOLDERS.items() if isinstance(value, kind)), ())
    for behind in (*tabled, *(getattr(value, name, None) for name in names)):
        yield from _functions_of(behind)
