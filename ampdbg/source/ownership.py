"""Whose code it is: the user's own, which a patch may edit, or an installed library's."""

from __future__ import annotations

import functools
import inspect
import sysconfig
from pathlib import Path

INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")})
LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Packages of another environment, which a ``.pth`` file or PYTHONPATH brings in, lie in folders of these names."""

AMPDBG = Path(__file__).resolve().parents[1]


def is_users_file(file: str) -> bool:
    """Whether a source file is there and neither installed nor ampdbg's."""
    path = Path(file)
    return path.suffix == ".py" and path.exists() and not _is_installed(path.resolve())


@functools.lru_cache(maxsize=4096)
def _is_installed(path: Path) -> bool:
    in_library = not LIBRARY_FOLDERS.isdisjoint(path.parts)
    return in_library or any(path.is_relative_to(place) for place in (*INSTALLED, AMPDBG))


def file_of_class(kind: type) -> str:
    """The source file of a class; "" where none is known."""
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):
        return ""


def is_library_class(kind: type) -> bool:
    """Whether the source of the class is not the user's; so is one whose source is not known."""
    return not is_users_file(file_of_class(kind))
