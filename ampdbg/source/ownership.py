"""Whose code it is: the user's own, an installed library's, torch's, Python's or ampdbg's.

Running code is known by the name of its module, a file that a patch may edit by its place.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")})
LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Packages of another environment, which a ``.pth`` file or PYTHONPATH brings in, lie in folders of these names."""

AMPDBG = Path(__file__).resolve().parents[1]


STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep

Line = tuple[str, int, str]
"""File, line number, function."""


class LibraryLine(tuple[str, int, str]):
    """A line of a library's code, with that of the user's code that led there: the same line wherever it is called."""

    caller: Line

    def __new__(cls, line: Line, caller: Line) -> LibraryLine:
        made = super().__new__(cls, line)
        made.caller = caller
        return made


def module_of(frame: FrameType) -> str:
    """The name of the module that the code is in, also where that runs as ``__main__``; "" where it has none."""
    name, spec = frame.f_globals.get("__name__"), frame.f_globals.get("__spec__")
    return str(getattr(spec, "name", name) if name == "__main__" else name or "")


def is_part_of(frame: FrameType, *packages: str) -> bool:
    """The code is in one of these packages or modules, or below."""
    module = module_of(frame)
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_ampdbgs(frame: FrameType) -> bool:
    """The code is ampdbg's own."""
    return is_part_of(frame, __name__.partition(".")[0])


Answer = TypeVar("Answer")


def by_code(ask: Callable[[FrameType], Answer]) -> Callable[[FrameType], Answer]:
    """A question whose answer is the same for every frame of the same code: asked once."""
    # By id, and the code kept: code objects are equal that differ in nothing but their file.
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
    """The code is none of torch's, ampdbg's or the standard library's, nor made while it runs."""
    file = frame.f_code.co_filename
    if file.startswith("<") or is_part_of(frame, "torch") or is_ampdbgs(frame):
        return False
    # contextlib and functools stand between a decorated forward and its caller; a user's file may be a code.py.
    is_pythons = module_of(frame).partition(".")[0] in sys.stdlib_module_names
    return not (is_pythons and file.startswith(STANDARD_LIBRARY))


def line_of_error(error: BaseException) -> Line | None:
    """The innermost line of the user's or a library's code that an error came through."""
    lines = [
        (frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_users_or_a_librarys(frame)
    ]
    return lines[-1] if lines else None


def is_users_file(file: str) -> bool:
    """A source file exists and is neither installed nor ampdbg's."""
    return file.endswith(".py") and not _is_installed(os.path.dirname(os.path.abspath(file))) and os.path.exists(file)


@by_code
def is_users(frame: FrameType) -> bool:
    """The code stands in such a file."""
    return is_users_file(frame.f_code.co_filename)


def loaded_files() -> list[str]:
    """The user's own files among the modules that are loaded, the script among them."""
    files = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    return [file for file in dict.fromkeys(files) if isinstance(file, str) and is_users_file(file)]


def lies_in_library(file: str | Path) -> bool:
    """The path leads through a folder of installed packages, on this machine or on another."""
    return not LIBRARY_FOLDERS.isdisjoint(Path(file).parts)


@functools.lru_cache(maxsize=4096)
def _is_installed(folder: str) -> bool:
    """A folder, or what it links to: to ask that of each file of a process takes a quarter of a second."""
    path = Path(folder).resolve()
    return lies_in_library(path) or any(path.is_relative_to(place) for place in (*INSTALLED, AMPDBG))


def is_library_class(kind: type) -> bool:
    """The source of the class is not the user's, or is not known."""
    try:
        return not is_users_file(inspect.getfile(kind))
    except (TypeError, OSError):
        return True
