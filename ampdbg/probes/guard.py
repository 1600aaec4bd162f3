"""Keeps exceptions in ampdbg's own watcher code away from the training loop that it watches."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampdbg.errors import named_error


class Guard:
    """Runs a watcher's handlers around the loop's calls, and stops the watcher at its first own exception."""

    def __init__(self) -> None:
        self.failure = ""
        """The watcher's own error as text; once set, the watcher must record nothing more."""
        self.failed: Callable[[], None] = lambda: None
        """Called when the watcher has failed, to remove its other hooks from torch."""
        self._callback_error = 0

    def around(
        self, handler: Callable[..., Any], watcher: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the watcher's handler, which calls ``original``; if the handler fails, the call ends as without it."""
        self._callback_error = 0
        returned: list[Any] = []
        raised: Exception | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal raised
            try:
                returned[:] = [original(*args, **kwargs)]
            except Exception as error:
                raised = error
                raise
            return returned[0]

        try:
            try:
                return handler(watcher, run, *args, **kwargs)
            except Exception as error:
                if error is raised or id(error) == self._callback_error or _is_of_a_signal(error):
                    raise
                self._fail(error)
            if raised is not None:
                raise raised
            return returned[0] if returned else original(*args, **kwargs)
        finally:
            raised = None  # its traceback refers to this frame: a reference cycle

    def run_hook(self, hook: Callable[..., Any], *given: Any) -> Any:
        """Return the result of the watcher's hook, such as that of an optimizer step; the hook's own errors stop the
        watcher. Then return None."""
        self._callback_error = 0
        try:
            return hook(*given)
        except Exception as error:
            if id(error) == self._callback_error or _is_of_a_signal(error):
                raise
            self._fail(error)
        return None

    def for_callback(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap a callback of the user, so that its errors reach the loop."""

        def called(step: Any) -> None:
            try:
                callback(step)
            except Exception as error:
                self._callback_error = id(error)
                raise

        return called

    def _fail(self, error: Exception) -> None:
        # Keep only text: the error refers to the frames of a step, and so to its tensors.
        at = traceback.extract_tb(error.__traceback__)[-1]
        self.failure = f"{named_error(error)} ({Path(at.filename).name}, line {at.lineno})"
        with contextlib.suppress(Exception):
            self.failed()


def _is_of_a_signal(error: Exception) -> bool:
    """True if a signal handler of the loop raised the error, as for a time limit; that can happen on any line."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
