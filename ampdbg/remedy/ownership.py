"""Whose code a class is: the user's own, which a patch may edit, or an installed library's."""

from __future__ import annotations

import inspect
import sysconfig
from pathlib import Path

INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")})


def is_library_class(kind: type) -> bool:
    """Whether the source of the class is installed; so is one whose source is not known."""
    try:
        path = Path(inspect.getfile(kind)).resolve()
    except (TypeError, OSError):
        return True
    return any(path.is_relative_to(place) for place in INSTALLED)
