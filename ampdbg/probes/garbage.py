"""When Python looks for garbage: never in the middle of what makes, or looks at, very many objects."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

SHARE = 20.0
"""So many times as long as Python has looked through all objects it is not to do so again."""

ALL, YOUNG = 2, 1
"""Generations of objects, as ``gc.collect`` counts them."""


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
        elif _sweeping:
            _sweeping[-1].sweep()


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """While this is entered Python looks for garbage behind what is ``uncollected``: there among what was made
    meanwhile, and only now and then through all that there is. What a search keeps of each trial would make it do so
    again and again. Where Python does not look for garbage at all, nothing is changed."""
    if not gc.isenabled():
        yield
        return
    sweep = _Sweep()
    _sweeping.append(sweep)
    gc.disable()
    try:
        yield
    finally:
        _sweeping.remove(sweep)
        gc.enable()


class _Sweep:
    def __init__(self) -> None:
        self._last, self._took = time.monotonic(), 0.0

    def sweep(self) -> None:
        """Looks among the objects that were made since the last time; through all of them if that is due."""
        began = time.monotonic()
        if began - self._last < SHARE * self._took:
            gc.collect(YOUNG)
            return
        gc.collect(ALL)
        self._last = time.monotonic()
        self._took = self._last - began


_sweeping: list[_Sweep] = []
"""One at most: within it nothing is collected, and another changes nothing."""
