"""The source line that an op belongs to: the innermost frame that is neither torch's nor ampdbg's."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

from ampdbg.findings import Source

_TORCH = str(Path(torch.__file__).parent) + os.sep
_AMPDBG = str(Path(__file__).parent.parent) + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_SITE_PACKAGES = os.sep + "site-packages" + os.sep

# The frame from which autograd's engine is started: what stands above it is the caller of backward().
_ENGINE = ("_engine_run_backward",)

Line = tuple[str, int, str]
"""File, line number, function."""

_plain_code: dict[CodeType, bool] = {}


def innermost_line(depth: int = 1) -> tuple[Line | None, bool]:
    """The innermost line of the user's or a library's code, and whether it stands inside a backward pass.

    Frames are looked at from ``depth`` above the caller. A line that merely called ``backward()`` is not
    what its ops belong to, so the search stops at autograd's engine: ``(None, True)``. A line that was
    found below the engine (a custom Function's backward, a recomputed forward) is ``(line, True)``.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    found: Line | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in _ENGINE and code.co_filename.startswith(_TORCH):
            return found, True
        if found is None and _is_named(code):
            found = (code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return found, False


def source_of(line: Line) -> Source:
    """The line with its text, as it stands in the file now."""
    file, number, function = line
    return Source(file, number, function, linecache.getline(file, number).strip())


def _is_named(code: CodeType) -> bool:
    known = _plain_code.get(code)
    if known is None:
        known = _plain_code[code] = _is_users_or_a_librarys(code.co_filename)
    return known


def _is_users_or_a_librarys(file: str) -> bool:
    if file.startswith((_TORCH, _AMPDBG, "<")):
        return False
    # contextlib and functools stand between a decorated forward and its caller.
    return not file.startswith(_STANDARD_LIBRARY) or _SITE_PACKAGES in file
