"""Signals that end a command from outside: Ctrl-C, SIGTERM of a batch system, and SIGHUP of a terminal that goes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any

INTERRUPTED: ContextVar[list[int]] = ContextVar("INTERRUPTED")
"""The signals that have interrupted this command. An import of torch's may swallow the KeyboardInterrupt of one, and
what runs on then has to ask."""

SAME = 0.5
"""Seconds within which a signal is the one before once more: ``timeout`` sends each to the process and to its group."""

Handlers = Mapping[int, Any]
"""What handles them, by the number of the signal; those are left out that are ignored, as by ``nohup``."""


@contextlib.contextmanager
def interruptible(at_import: Callable[[], int]) -> Iterator[None]:
    """While this is entered each raises the KeyboardInterrupt that saves it all, and a second one ends that too.

    What ``at_import`` returns is the exit code where torch's own import is interrupted: an exception there, behind
    which its C++ ends the process, is none of ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, signals, times = os.getpid(), list[int](), [-math.inf]
    INTERRUPTED.set(signals)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner and number != signal.SIGINT:  # a DataLoader worker, which must die as it always did
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        times.append(time.monotonic())
        if times[-1] - times[-2] < SAME:
            return
        signals.append(number)
        imported = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(imported, "_initializing", False):  # an exception would leave torch's C++ half set up
            os._exit(at_import())
        raise KeyboardInterrupt

    before = _handlers(even_if_ignored="SIGTERM")
    _set(dict.fromkeys(before, interrupt))
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """While this is entered the first of them waits; a second does not, for a disk may hang."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, came = _handlers(), list[int]()

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            _set(before)
            signal.raise_signal(number)

    _set(dict.fromkeys(before, hold))
    try:
        yield
    finally:
        _set(before)
        if len(came) == 1:
            signal.raise_signal(came[0])


def raise_if_interrupted() -> None:
    """To be called between the parts of a run: raises the KeyboardInterrupt that somebody has swallowed."""
    if INTERRUPTED.get([]):
        raise KeyboardInterrupt


def _handlers(even_if_ignored: str = "") -> Handlers:
    names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
    found = {name: signal.getsignal(getattr(signal, name)) for name in names}  # None is of no Python's: it stays
    left_alone = {name for name in names if found[name] is signal.SIG_IGN and name != even_if_ignored}
    return {getattr(signal, name): found[name] for name in names if found[name] is not None and name not in left_alone}


def _set(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
