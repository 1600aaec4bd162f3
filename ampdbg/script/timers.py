"""The timers of a script, whose signals come at any moment, also while it waits or has ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def held_timers() -> Iterator[None]:
    """While this is entered no timer of the script's runs; afterwards it has as long to go as before."""
    left = take_timers()
    try:
        yield
    finally:
        for timer, (seconds, interval) in left.items():
            if seconds:
                signal.setitimer(timer, seconds, interval)


def take_timers() -> dict[int, tuple[float, float]]:
    """Stops all timers that send signals; returns how long each had to go, and how long between two."""
    names = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
    timers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has none
    return {timer: signal.setitimer(timer, 0.0) for timer in timers}
