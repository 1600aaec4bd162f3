"""Hold back the script's timers and own signal handlers, which may run at any moment, even while the script waits."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_came: list[int] = []


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Stop the script's timers and defer its own signal handlers inside this context.

    On exit, run the deferred handlers and resume each timer with its remaining time. A handler may stop the loop with a
    flag or save a model. It must see the state of the loop and not of a replayed step.
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
    """True if a signal is waiting to be handled."""
    return bool(_came)


def take_timers() -> dict[int, tuple[float, float]]:
    """Stop all timers that send signals. Return the remaining time and the interval of each timer."""
    names = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
    timers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has no timers
    return {timer: signal.setitimer(timer, 0.0) for timer in timers}


def _own_handlers() -> dict[int, Callable[..., Any]]:
    """Return the script's own handlers by signal number. Only the main thread can hold them back."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in found.items() if callable(handler) and not _is_known(handler)}


def _is_known(handler: Any) -> bool:
    is_ours = str(getattr(handler, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
    return is_ours or handler is signal.default_int_handler


def _handle(numbers: list[int]) -> None:
    _came[:] = [number for number in _came if number not in numbers]
    with contextlib.ExitStack() as stack:  # a handler may raise, and the others still run
        for number in reversed(numbers):
            stack.callback(signal.raise_signal, number)
