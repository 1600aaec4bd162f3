"""Ownership of code: the user's, an installed library's, torch's, Python's or ampdbg's.

Running code is identified by its module name, and a file that a patch may edit by its path.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")})
LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Folder names of installed packages, also in another environment that a ``.pth`` file or PYTHONPATH adds."""

AMPDBG = Path(__file__).resolve().parents[1]


STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep

Line = tuple[str, int, str]
"""A file, a line number and a function name."""


class LibraryLine(tuple[str, int, str]):
    """A line of library code with the user's line that called it. Equal lines may have different callers."""

    caller: Line

    def __new__(cls, line: Line, caller: Line) -> LibraryLine:
        made = super().__new__(cls, line)
        made.caller = caller
        return made


def module_of(frame: FrameType) -> str:
    """Return the module name of the frame's code, even if it runs as ``__main__``, or "" if there is none."""
    name, spec = frame.f_globals.get("__name__"), frame.f_globals.get("__spec__")
    return str(getattr(spec, "name", name) if name == "__main__" else name or "")


def is_part_of(frame: FrameType, *packages: str) -> bool:
    """True if the code is in one of these packages or modules, or in a submodule."""
    module = module_of(frame)
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_ampdbgs(frame: FrameType) -> bool:
    """True if the code belongs to ampdbg."""
    return is_part_of(frame, __name__.partition(".")[0])


Answer = TypeVar("Answer")


def by_code(ask: Callable[[FrameType], Answer]) -> Callable[[FrameType], Answer]:
    """Cache the answers of ``ask`` by code object. Frames with the same code must have the same answer."""
    # Keyed by id, with the code kept alive: code objects that differ only in their file compare equal.
    known: dict[int, tuple[Answer, CodeType]] = {}

    @functools.wraps(ask)
    def answer(frame: FrameType) -> Answer:
        key = id(frame.f_code)
        if key not in known:
            known[key] = ask(frame), frame.f_code
        return known[key][0]

    return answer


@by_code
def is_users_or_a_librarys(frame: FrameType) -> bool:
    """True unless the code belongs to torch, ampdbg or the standard library, or was generated at run time."""
    file = frame.f_code.co_filename
    if file.startswith("<") or is_part_of(frame, "torch") or is_ampdbgs(frame):
        return False
    # contextlib and functools run between a decorated forward and its caller. A user's file may be named code.py.
    is_pythons = module_of(frame).partition(".")[0] in sys.stdlib_module_names
    return not (is_pythons and file.startswith(STANDARD_LIBRARY))


def line_of_error(error: BaseException) -> Line | None:
    """Return the innermost line of user or library code in an error's traceback, or None."""
    lines = [
        (frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_users_or_a_librarys(frame)
    ]
    return lines[-1] if lines else None


def is_users_file(file: str) -> bool:
    """True if the file is an existing source file that is neither installed nor part of ampdbg."""
    return file.endswith(".py") and not _is_installed(os.path.dirname(os.path.abspath(file))) and os.path.exists(file)


@by_code
def is_users(frame: FrameType) -> bool:
    """True if the code is in a file of the user's."""
    return is_users_file(frame.f_code.co_filename)


def loaded_files() -> list[str]:
    """Return the user's files among the loaded modules, including the script."""
    files = (getattr(module, "__dict__", {}).get("__file__") for module in tuple(sys.modules.values()))
    return [file for file in dict.fromkeys(files) if isinstance(file, str) and is_users_file(file)]


def lies_in_library(file: str | Path) -> bool:
    """True if the path contains a folder of installed packages, on this or another machine."""
    return not LIBRARY_FOLDERS.isdisjoint(Path(file).parts)


@functools.lru_cache(maxsize=4096)
def _is_installed(folder: str) -> bool:
    """True if the folder, links resolved, is installed or ampdbg's. Cached: all files of a process take 0.25 s."""
    path = Path(folder).resolve()
    return lies_in_library(path) or any(path.is_relative_to(place) for place in (*INSTALLED, AMPDBG))


def is_library_class(kind: type) -> bool:
    """True if the source of the class is not the user's, or is unknown."""
    try:
        return not is_users_file(inspect.getfile(kind))
    except (TypeError, OSError):
        return True


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of its inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_within(constant)
