"""The signals that end a command: Ctrl-C, SIGTERM of a batch system, and SIGHUP of a closed terminal."""

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
"""The signals that have interrupted this command. An import of torch may swallow their KeyboardInterrupt, so code that
continues after it must check this list."""

SAME = 0.5
"""Seconds within which two signals count as one: ``timeout`` sends each to the process and to its group."""

Handlers = Mapping[int, Any]
"""The handlers by the number of the signal, without ignored signals (as by ``nohup``)."""


@contextlib.contextmanager
def interruptible(at_import: Callable[[], int]) -> Iterator[None]:
    """Within the block each signal raises a KeyboardInterrupt, on which results are saved. A second one ends that too.

    During torch's own import the process exits with what ``at_import`` returns: after an exception there, torch's C++
    code would end the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, signals, times = os.getpid(), list[int](), [-math.inf]
    INTERRUPTED.set(signals)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner and number != signal.SIGINT:  # a DataLoader worker, which must die as without ampdbg
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        times.append(time.monotonic())
        if times[-1] - times[-2] < SAME:
            return
        signals.append(number)
        imported = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(imported, "_initializing", False):  # an exception would leave torch's C++ half initialized
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
    """Within the block the first signal waits. A second signal takes effect at once, for a disk may hang."""
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
    """Raise the KeyboardInterrupt that other code has swallowed; called between the parts of a run."""
    if INTERRUPTED.get([]):
        raise KeyboardInterrupt


def _handlers(even_if_ignored: str = "") -> Handlers:
    names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
    found = {name: signal.getsignal(getattr(signal, name)) for name in names}  # None: not set by Python, kept
    left_alone = {name for name in names if found[name] is signal.SIG_IGN and name != even_if_ignored}
    return {getattr(signal, name): found[name] for name in names if found[name] is not None and name not in left_alone}


def _set(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
