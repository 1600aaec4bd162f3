"""The source line that an op belongs to: the innermost frame that is neither torch's nor ampdbg's."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

from ampdbg.record.findings import Source

_TORCH = str(Path(torch.__file__).parent) + os.sep
_AMPDBG = str(Path(__file__).parent.parent) + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_SITE_PACKAGES = os.sep + "site-packages" + os.sep
_CHECKPOINT = str(Path(_TORCH, "utils", "checkpoint.py"))

# What runs the user's code: frames above belong to whoever has started ampdbg, a program or a script.
_RUNNERS = (_AMPDBG + "workload" + os.sep, _AMPDBG + "training" + os.sep)

# The frame from which autograd's engine is started: what stands above it is the caller of backward().
_ENGINE = "_engine_run_backward"

Line = tuple[str, int, str]
"""File, line number, function."""

_plain_code: dict[CodeType, bool] = {}


def innermost_line(depth: int = 1) -> Line | None:
    """The innermost line of the user's or a library's code, from ``depth`` frames above the caller.

    None where torch was called by nobody but ampdbg, as for a loss that is one of torch's own functions.

    A line that merely called ``backward()`` is not what the ops of the backward pass belong to, so the
    search ends at autograd's engine. What is found below it is a custom Function's backward, a hook, or
    a forward pass that is computed again.
    """
    frame = _innermost_frame(sys._getframe(depth + 1))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def is_recomputing(depth: int = 1) -> bool:
    """Whether the innermost line stands in a forward pass that ``torch.utils.checkpoint`` computes again."""
    frame = _innermost_frame(sys._getframe(depth + 1))
    while frame is not None and not _is_engine(frame.f_code):
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def source_of(line: Line) -> Source:
    """The line with its text, as it stands in the file now."""
    file, number, function = line
    return Source(file, number, function, linecache.getline(file, number).strip())


def _innermost_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_named(frame.f_code):
        if _is_engine(frame.f_code) or frame.f_code.co_filename.startswith(_RUNNERS):
            return None
        frame = frame.f_back
    return frame


def _is_engine(code: CodeType) -> bool:
    return code.co_name == _ENGINE and code.co_filename.startswith(_TORCH)


def is_named(code: CodeType) -> bool:
    """Whether this is the user's or a library's code, and no part of torch, ampdbg or the standard library."""
    known = _plain_code.get(code)
    if known is None:
        known = _plain_code[code] = _is_users_or_a_librarys(code.co_filename)
    return known


def _is_users_or_a_librarys(file: str) -> bool:
    if file.startswith((_TORCH, _AMPDBG, "<")):
        return False
    # contextlib and functools stand between a decorated forward and its caller.
    return not file.startswith(_STANDARD_LIBRARY) or _SITE_PACKAGES in file
