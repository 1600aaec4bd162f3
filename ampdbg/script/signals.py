"""The signals of a script's timers, and those that it handles itself: they come at any moment, also while it waits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_came: list[int] = []


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """While this is entered no timer of the script's runs, and no handler of its own.

    Afterwards what has come is handled, and a timer has as long to go as before. A handler may stop the loop by a flag,
    or save a model: it is to find what it finds in the loop, and not a step that is run again.
    """
    timers, handlers = take_timers(), _own_handlers()
    try:
        for number in handlers:
            signal.signal(number, lambda came, frame: _came.append(came))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for timer, (seconds, interval) in timers.items():
            if seconds:
                signal.setitimer(timer, seconds, interval)
        _handle([number for number in dict.fromkeys(_came) if number in handlers])


def have_come() -> bool:
    """One waits to be handled."""
    return bool(_came)


def take_timers() -> dict[int, tuple[float, float]]:
    """Stops all timers that send signals; returns how long each had to go, and how long between two."""
    names = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
    timers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has none
    return {timer: signal.setitimer(timer, 0.0) for timer in timers}


def _own_handlers() -> dict[int, Callable[..., Any]]:
    """The script's, by the number of the signal; none but the main thread can hold them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in found.items() if callable(handler) and not _is_known(handler)}


def _is_known(handler: Any) -> bool:
    is_ours = str(getattr(handler, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
    return is_ours or handler is signal.default_int_handler


def _handle(numbers: list[int]) -> None:
    _came[:] = [number for number in _came if number not in numbers]
    with contextlib.ExitStack() as stack:  # one may raise
        for number in reversed(numbers):
            stack.callback(signal.raise_signal, number)
