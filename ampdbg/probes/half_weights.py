"""Finds the user's lines that make weights half, and the lines that call the model with these weights."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_parameter_registration_hook

from ampdbg.probes.half_names import value_in
from ampdbg.probes.seams import attached, replaced
from ampdbg.probes.tensors import HALVES
from ampdbg.source.document import Document
from ampdbg.source.ownership import is_users
from ampdbg.source.source_file import read_source

NAMES = {"float16": torch.float16, "half": torch.float16, "bfloat16": torch.bfloat16, "auto": torch.bfloat16}
"""Half dtypes by the names that libraries accept. ``auto`` is the checkpoint's dtype, which is half on a cast line."""


class CastLine(NamedTuple):
    """A line of the user's code, from 1, that makes weights half; ``dtypes`` are its expressions for a half dtype."""

    file: str
    line: int
    dtypes: frozenset[str]


class LoopLines(NamedTuple):
    """The lines of one function from its ``first`` model call to its ``backward`` call. ``files`` are all user files on
    the stack of the backward call."""

    file: str
    first: int
    backward: int
    files: frozenset[str] = frozenset()


class HalfWeights:
    """Records, while entered, which line of the user's code makes each parameter half.

    It also records the lines from a model call to its backward pass. The last pass before the first optimizer step
    counts: earlier passes may only measure the memory of a step.
    """

    def __init__(self) -> None:
        self._casts: dict[int, CastLine | None] = {}
        self._default: CastLine | None = None
        self._calls: list[dict[int, int]] = []  # the line of each frame, by id
        self._entered = ExitStack()
        self._has_stepped = False
        self.loop: LoopLines | None = None
        self.is_lowered = False
        """True if the script trains the model, or a part of it, under autocast."""
        self.outside: dict[tuple[str, int], None] = {}
        """The user's lines that call the model without gradients and without autocast."""

    def __enter__(self) -> HalfWeights:
        with ExitStack() as stack:
            stack.callback(register_module_parameter_registration_hook(self._registered).remove)
            stack.callback(register_module_forward_pre_hook(self._called).remove)
            stack.enter_context(replaced(nn.Parameter, "__setattr__", self._given_data))
            stack.enter_context(replaced(torch, "set_default_dtype", self._setting))
            stack.enter_context(attached(self._around))
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.close()

    def casts(self, half: Iterable[nn.Parameter]) -> tuple[CastLine, ...]:
        """Return the lines that made these parameters half; all known cast lines if a parameter's line is unknown."""
        known = [self._casts.get(id(one)) for one in half]
        found = dict.fromkeys([*self._casts.values()] if None in known else known)
        return tuple(one for one in found if one is not None)

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        if getattr(parameter, "dtype", None) in HALVES:
            self._casts[id(parameter)] = self._default or _cast_line()

    def _given_data(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Parameter.__setattr__``: module casts, and some scripts, assign the half tensor to ``data``."""

        def set_attribute(parameter: nn.Parameter, name: str, value: Any) -> None:
            before = parameter.dtype
            original(parameter, name, value)
            if parameter.dtype in HALVES and before not in HALVES:
                self._casts[id(parameter)] = _cast_line()

        return set_attribute

    def _setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_default_dtype(dtype: Any) -> None:
            original(dtype)
            self._default = _cast_line() if dtype in HALVES else None

        return set_default_dtype

    def _called(self, module: nn.Module, args: Any) -> None:
        if self._has_stepped and torch.is_grad_enabled():
            return
        frames = [*_frames()]
        calls = [place for place, frame in enumerate(frames) if frame.f_code.co_name == "_call_impl"]
        is_lowered = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if torch.is_grad_enabled():
            self.is_lowered |= is_lowered
            if len(calls) == 1:
                self._calls.append({id(frame): frame.f_lineno for frame in filter(is_users, frames)})
        elif not is_lowered and module._parameters and calls:
            caller = next(filter(is_users, frames[calls[-1] :]), None)
            self.outside |= {(caller.f_code.co_filename, caller.f_lineno): None} if caller is not None else {}

    def _around(self, seam: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._has_stepped |= seam == "written"
        if seam == "engine" and not self._has_stepped:
            frames = [*filter(is_users, _frames())]
            for frame in frames:
                if lines := [call[id(frame)] for call in self._calls if id(frame) in call]:
                    files = frozenset(one.f_code.co_filename for one in frames)
                    self.loop = LoopLines(frame.f_code.co_filename, min(lines), frame.f_lineno, files)
                    break
            self._calls.clear()
        return original(*args, **kwargs)


def _frames() -> Iterator[FrameType]:
    """Return the stack frames of this thread, innermost first."""
    return (frame for frame, _ in walk_stack(sys._getframe(1)))


def _cast_line() -> CastLine | None:
    """Return the user's innermost line. If it and its callers name a half dtype, return the outermost of that chain."""
    users = filter(is_users, _frames())
    lines = [CastLine(frame.f_code.co_filename, frame.f_lineno, _dtypes_on(frame)) for frame in users]
    return next(iter([*takewhile(attrgetter("dtypes"), lines)][-1:] + lines), None)


def _dtypes_on(frame: FrameType) -> frozenset[str]:
    """Return the names, attributes and strings in the frame's current statement that mean a half dtype."""
    with contextlib.suppress(Exception):  # the file is gone
        document = document_of(frame.f_code.co_filename)
        texts = (one.value for one in document.find(ast.keyword) if str(one.arg).endswith("dtype"))
        nodes = [*document.loads(), *(one for one in texts if isinstance(one, ast.Constant))]
        statement = document.statements[frame.f_lineno]
        on_it = [node for node in nodes if document.statement(node) is statement]
        return frozenset(document.source(node) for node in on_it if _means_half(node, value_in(frame, node)))
    return frozenset()


def _means_half(node: ast.AST, value: Any) -> bool:
    dtype = NAMES.get(value) if isinstance(node, ast.Constant) else value
    return any(dtype is one for one in HALVES)  # a user's value may refuse to be compared


def document_of(file: str) -> Document:
    """Parse a source file, as it is on disk now."""
    return read_source(Path(file).read_bytes()).document
