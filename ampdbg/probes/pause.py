"""When a watch notes nothing: while it is paused, and while a step is run again below a loop that it watches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Replays(threading.local):
    under_way = 0


_replays = _Replays()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While this is entered nothing watches this thread: what it does is no part of any loop."""
    _replays.under_way += 1
    try:
        yield
    finally:
        _replays.under_way -= 1


class Pause:
    """That of one watch, for all threads."""

    def __init__(self) -> None:
        self._is_made = False

    @property
    def is_now(self) -> bool:
        """Whether this thread is not to be watched now."""
        return self._is_made or _replays.under_way > 0

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """While this is entered nothing is noted."""
        before, self._is_made = self._is_made, True
        try:
            yield
        finally:
            self._is_made = before
