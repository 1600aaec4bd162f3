"""Pauses all watches in a thread, while a replay runs below a watched loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    pauses = 0


_thread = _Thread()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Pause every watch in this thread, for work outside any loop, such as a replay."""
    _thread.pauses += 1
    try:
        yield
    finally:
        _thread.pauses -= 1


def is_unwatched() -> bool:
    """True if watches are paused in this thread."""
    return _thread.pauses > 0
