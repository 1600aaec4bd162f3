"""When no watch notes what a thread does: while a step is run again below a loop that it watches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    pauses = 0


_thread = _Thread()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While this is entered nothing watches this thread: what it does is no part of any loop, such as a replay."""
    _thread.pauses += 1
    try:
        yield
    finally:
        _thread.pauses -= 1


def is_unwatched() -> bool:
    """This thread is not to be watched now."""
    return _thread.pauses > 0
