"""Keeps Python's garbage collector from running while code creates or searches very many objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = 100
"""Full collections, which search all objects and not only young ones, become rarer by this factor."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off inside the ``with`` block.

    A step creates many objects that live until its end. Whenever their number grows by a quarter, Python would search
    all objects, those of all imports too, and free none. Afterward they are still young, and Python checks them first.
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
    """Make full garbage collections ``SELDOM`` times rarer; collections of young objects continue. The results that a
    pin search keeps from each trial would otherwise cause one full collection after the other."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
