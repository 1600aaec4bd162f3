"""What the code of an optimizer's step can reach: a second run of it must leave nothing behind.

Only byte code is read. A step may use torch and a few modules without state, functions whose code is as harmless, and
constants. Any other global object, cell or class attribute may change with each run, and the step is refused.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

MODULES = frozenset(
    {"builtins", "torch", "math", "typing", "functools", "operator", "collections", "random", "numpy", "copy"}
)
"""Modules without state that lasts, but for the random state, which is restored. Others may log or write."""

SHAPES = frozenset({"ndim", "dim", "ndimension", "shape", "size", "numel", "norm"})
"""Names that read the shape of a parameter or all its entries: a step with these needs whole parameters."""

OUTWARD = frozenset({"__class__", "__dict__", "save", "savez", "savetxt", "tofile", "manual_seed", "seed_all"})
"""Attributes and names with which code reaches its class, writes a file, or seeds torch."""

REFUSED = frozenset({"vars", "open", "input", "exec", "eval", "globals", "setattr", "exit", "quit"})
"""Builtins with which code reaches what outlives it, or ends the process."""

CODE = (FunctionType, BuiltinFunctionType, functools.partial, classmethod, staticmethod, property)
CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@functools.lru_cache(maxsize=64)
def why_not_repeatable(kind: type[Any]) -> str:
    """Return why a second run of the class's step may leave something behind, or ""."""
    with suppress(Exception):  # such as a class without a step, or a cell without contents
        for own in _own_classes(kind):
            for name, value in vars(own).items():
                if not (name.startswith("__") or _is_harmless(value)):
                    return f"its step may change {own.__name__}.{name}"
        return next(filter(None, map(_why_not, _reached(kind))), "")
    return "the code of its step cannot be read"


@functools.lru_cache(maxsize=64)
def reads_shapes(kind: type[Any]) -> bool:
    """True if the class's step may depend on the shape of a parameter, or on all of its entries."""
    with suppress(Exception):  # then the step does not run a second time
        return any(not SHAPES.isdisjoint(function.__code__.co_names) for function in _reached(kind))
    return False


def _own_classes(kind: type[Any]) -> list[type[Any]]:
    return [one for one in kind.__mro__ if not one.__module__.startswith(("torch.", "builtins", "typing"))]


def _reached(kind: type[Any]) -> Iterator[FunctionType]:
    """Yield the functions that a step can call, as far as their names show."""
    methods = [pair for own in _own_classes(kind) for pair in vars(own).items()]
    names, seen = {"step"}, set[FunctionType]()
    waiting: list[Any] = []
    while names or waiting:
        waiting += [value for name, value in methods if name in names]
        found = {inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one))) for one in waiting}
        new = {one for one in found if isinstance(one, FunctionType) and not _is_of_torch(one)} - seen
        yield from new
        seen |= new
        names = {name for one in new for name in _named(one, "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")}
        waiting = [value for one in new for value in _used(one)]


def _used(function: FunctionType) -> list[Any]:
    """Return the global objects that a function loads, the contents of its cells, and its defaults."""
    cells = dict(inspect.getclosurevars(function).nonlocals)
    cells.pop("__class__", None)  # for super()
    named = [function.__globals__[name] for name in _named(function, "LOAD_GLOBAL") & function.__globals__.keys()]
    return [*cells.values(), *named, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _named(function: FunctionType, *kinds: str) -> set[str]:
    """Return the names in the instructions of these kinds, inner functions included."""
    codes = _codes(function.__code__)
    return {str(one.argval) for code in codes for one in dis.get_instructions(code) if one.opname in kinds}


def _why_not(function: FunctionType) -> str:
    set_outside = _named(function, "STORE_GLOBAL", "DELETE_GLOBAL")
    set_outside |= _named(function, "STORE_DEREF") & {*function.__code__.co_freevars}
    reached = _named(function, "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD") & OUTWARD
    refused = REFUSED | ({"type"} if _named(function, "STORE_ATTR") else set())
    reached |= _named(function, "LOAD_GLOBAL") & refused
    reached |= {one for one in _named(function, "IMPORT_NAME") if one.partition(".")[0] not in MODULES}
    if found := sorted(set_outside | reached):
        return f"its step uses or sets {found[0]}, which outlives it"
    odd = next((one for one in _used(function) if not _is_harmless(one)), None)
    return "" if odd is None else f"its step uses an object that outlives it, a {type(odd).__name__}"


def _is_harmless(value: Any) -> bool:
    """True for code, for constants, and for modules and classes without state that lasts."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_harmless, value))
    origin = str(getattr(value, "__module__", getattr(value, "__name__", "")))
    is_known = isinstance(value, (ModuleType, type)) and origin.partition(".")[0] in MODULES
    return is_known or isinstance(value, (*CODE, *CONSTANTS))


def _is_of_torch(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] == "torch"
