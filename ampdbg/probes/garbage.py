"""When Python looks for garbage: never in the middle of what makes, or looks at, very many objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = 100
"""So many times as seldom as otherwise Python looks through all objects, and not only through the young ones."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for cycles of garbage only afterwards, for as long as this is entered.

    A step makes many objects that stay until its end: each time that there are a quarter more of them Python would look
    through all, those of every import too, and find nothing. Behind it they are young still, and looked through first.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """While this is entered Python looks for garbage among what was made of late, and ``SELDOM`` through all that there
    is: what a search keeps of each trial would make it do so again and again."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
