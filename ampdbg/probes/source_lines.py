"""The source line that an op belongs to: the innermost frame outside torch and ampdbg."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal

from ampdbg import precision, probes
from ampdbg.record.findings import CodeLine, Source
from ampdbg.source.ownership import (
    LibraryLine,
    Line,
    by_code,
    is_ampdbgs,
    is_part_of,
    is_users_file,
    is_users_or_a_librarys,
    module_of,
)

MODES = ("__torch_function__", "__torch_dispatch__")
"""A user's own mode runs these methods around every function. The line that calls the function is further out."""

# By name, because this layer may not import it: the recorder, which records the calls of the user's code as they run.
_RECORDER = "ampdbg.replay.recorder"

# Frames of three parts of ampdbg may lie between the user's code and an op. All further ampdbg frames run the user's
# code, and the frames above belong to the caller of ampdbg, a program or a script.
_BETWEEN = (probes.__name__, precision.__name__, _RECORDER)

Role = Literal["users", "between", "module", "ends"]

# The frames above autograd's engine belong to the caller of backward().
_OF_TORCH: Mapping[str, Role] = {"_call_impl": "module", "_engine_run_backward": "ends"}


def innermost_line() -> Line | None:
    """Return the innermost line of the user's or a library's code, or None if ampdbg itself called a torch function.

    Inside a module's call it is a line of the package that defines the module. If a forward pass calls another library,
    such as einops, it is the line in the forward pass. A library's line is a :class:`LibraryLine` if the user's code
    called the library.

    Backward ops do not belong to the line that called ``backward()``, so the search ends at autograd's engine. Below
    the engine lies the backward of a custom Function, a hook, or a recomputed forward pass.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (role := _role(frame)) != "users":  # no generator, because every call runs this
        frame = frame.f_back if role != "ends" else None
    if frame is None:
        return None
    if _owner(frame) == _USERS:
        return _line_of(frame)
    frame = _in_its_module(frame)
    caller = next((one for role, one in _frames(frame) if role == "users" and _owner(one) == _USERS), frame)
    return _line_of(frame) if caller is frame else LibraryLine(_line_of(frame), _line_of(caller))


def _line_of(frame: FrameType) -> Line:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


@contextlib.contextmanager
def tracing(on_call: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Call ``on_call`` as ``sys.settrace`` does, in this thread. Afterwards restore the trace function of a debugger or
    a coverage tool."""
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def source_of(line: Line) -> Source:
    """Return the line with the text that its file has now."""
    called_from = CodeLine(*_with_text(line.caller)) if isinstance(line, LibraryLine) else None
    return Source(*_with_text(line), called_from)


def source_if_known(line: Line | None) -> Source | None:
    """Return the line with its text, or None for an unknown line."""
    return None if line is None else source_of(line)


def _with_text(line: Line) -> tuple[str, int, str, str]:
    return *line, linecache.getline(*line[:2]).strip()


def _frames(frame: FrameType | None) -> Iterator[tuple[Role, FrameType]]:
    """Yield the frame and its callers, each with its role, up to the end of the user's code."""
    while frame is not None and (role := _role(frame)) != "ends":
        yield role, frame
        frame = frame.f_back


def _in_its_module(innermost: FrameType) -> FrameType:
    """Return the innermost frame of the running forward pass's owner, or the given frame outside forward passes."""
    frames: list[FrameType] = []
    for role, frame in _frames(innermost):
        if role == "module":
            # A wrapper around the forward pass may have another owner, such as a training library.
            owners = (_owner_of(str(type(frame.f_locals.get("self")).__module__)), _owner(frames[-1]))
            return next(frame for owner in owners for frame in frames if _owner(frame) == owner)
        if role == "users":
            frames.append(frame)
    return innermost


_USERS = ""
"""The owner of code that is not installed."""


@by_code
def _owner(frame: FrameType) -> str:
    """Return the owner of the code: the user, the package, or the file for code outside modules, as in a replay."""
    file = frame.f_code.co_filename
    return _USERS if is_users_file(file) else module_of(frame).partition(".")[0] or file


@functools.cache
def _owner_of(module: str) -> str:
    """Return the owner of the definitions in the module of that name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return _USERS if file and is_users_file(file) else module.partition(".")[0]


@by_code
def _role(frame: FrameType) -> Role:
    """Return the role of the frame: ``users`` for user or library code; ``between`` for a frame between that and an op;
    ``module`` for the caller of a forward pass; ``ends`` for a frame above the user's code."""
    if is_users_or_a_librarys(frame) and frame.f_code.co_name not in MODES:
        return "users"
    if is_part_of(frame, "torch"):
        return _OF_TORCH.get(frame.f_code.co_name, "between")
    return "ends" if is_ampdbgs(frame) and not is_part_of(frame, *_BETWEEN) else "between"
