"""The source line that an op belongs to: the innermost frame that is neither torch's nor ampdbg's."""

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
"""What a mode of the user's own runs around every function: the line that calls the function is another's."""

# By its name, for it stands on a higher floor: what notes the calls of the user's code while it makes them.
_RECORDER = "ampdbg.replay.recorder"

# ampdbg's code that stands between the user's and an op; what of ampdbg's else comes above an op runs the user's code,
# and frames above that belong to whoever has started ampdbg, a program or a script.
_BETWEEN = (probes.__name__, precision.__name__, _RECORDER)

Role = Literal["users", "between", "module", "ends"]

# What stands above the frame from which autograd's engine is started is the caller of backward().
_OF_TORCH: Mapping[str, Role] = {"_call_impl": "module", "_engine_run_backward": "ends"}


def innermost_line() -> Line | None:
    """The innermost line of the user's or a library's code.

    Within a module's call it is of the code that the module is written in: of a forward pass that calls another
    library, as for an einsum of einops, the line in that pass. One of a library is a :class:`LibraryLine` where the
    user's code has led to it.

    None where torch was called by nobody but ampdbg, as for a loss that is one of torch's own functions.

    A line that merely called ``backward()`` is not what the ops of the backward pass belong to, so the
    search ends at autograd's engine. What is found below it is a custom Function's backward, a hook, or
    a forward pass that is computed again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (role := _role(frame)) != "users":  # no generator: this is asked for each call
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
    """Calls ``on_call`` as ``sys.settrace`` does, in this thread; a debugger's or a coverage tool's own trace function
    is put back afterwards."""
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def source_of(line: Line) -> Source:
    """The line with its text, as it stands in the file now."""
    called_from = CodeLine(*_with_text(line.caller)) if isinstance(line, LibraryLine) else None
    return Source(*_with_text(line), called_from)


def source_if_known(line: Line | None) -> Source | None:
    """The same of a line that may not be known."""
    return None if line is None else source_of(line)


def _with_text(line: Line) -> tuple[str, int, str, str]:
    return *line, linecache.getline(*line[:2]).strip()


def _frames(frame: FrameType | None) -> Iterator[tuple[Role, FrameType]]:
    """The frame and those above it, each with its role, up to where the user's code ends."""
    while frame is not None and (role := _role(frame)) != "ends":
        yield role, frame
        frame = frame.f_back


def _in_its_module(innermost: FrameType) -> FrameType:
    """The innermost frame of who has written the forward pass that runs; the one given where none does."""
    frames: list[FrameType] = []
    for role, frame in _frames(innermost):
        if role == "module":
            # What stands around a forward pass may be another's, as of a library that prepares models to be trained.
            owners = (_owner_of(str(type(frame.f_locals.get("self")).__module__)), _owner(frames[-1]))
            return next(frame for owner in owners for frame in frames if _owner(frame) == owner)
        if role == "users":
            frames.append(frame)
    return innermost


_USERS = ""
"""Who has written what is not installed."""


@by_code
def _owner(frame: FrameType) -> str:
    """Who has written the code: the user, or the package that it is part of; its file where it runs in no module, as
    what a replay calls."""
    file = frame.f_code.co_filename
    return _USERS if is_users_file(file) else module_of(frame).partition(".")[0] or file


@functools.cache
def _owner_of(module: str) -> str:
    """Who has written what is defined in the module of that name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return _USERS if file and is_users_file(file) else module.partition(".")[0]


@by_code
def _role(frame: FrameType) -> Role:
    """Of a user's or a library's code, of what stands between that and an op, of what calls a module's forward pass, or
    of what is above all of it."""
    if is_users_or_a_librarys(frame) and frame.f_code.co_name not in MODES:
        return "users"
    if is_part_of(frame, "torch"):
        return _OF_TORCH.get(frame.f_code.co_name, "between")
    return "ends" if is_ampdbgs(frame) and not is_part_of(frame, *_BETWEEN) else "between"
