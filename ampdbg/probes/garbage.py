"""When Python looks for garbage: never in the middle of what makes, or looks at, very many objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for cycles of garbage only afterwards, for as long as this is entered.

    A step makes many objects that stay until its end: each time that there are a quarter more of them Python would look
    through all, those of every import too, and find nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
