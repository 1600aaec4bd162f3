"""What goes wrong in a watcher itself is no concern of the loop that it watches."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampdbg.errors import named_error


class Guard:
    """Runs what a watcher does around a loop, and keeps the watcher's own failures from it."""

    def __init__(self) -> None:
        self.failure = ""
        """What went wrong in the watcher; it is to note nothing from then on."""
        self.failed: Callable[[], None] = lambda: None
        """Called when the watcher has failed: whatever else it has put into torch is to go."""
        self._told = 0

    def around(
        self, handler: Callable[..., Any], watcher: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the watcher's handler, which calls ``original``; where that fails, the call ends as without it."""
        self._told = 0
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
                if error is raised or id(error) == self._told or _is_of_a_signal(error):
                    raise
                self._fail(error)
            if raised is not None:
                raise raised
            return returned[0] if returned else original(*args, **kwargs)
        finally:
            raised = None  # it holds every frame below it, and so itself

    def hooked(self, hook: Callable[..., None], *given: Any) -> None:
        """Calls what hangs on an optimizer's step, or on the end of the loop."""
        self._told = 0
        try:
            hook(*given)
        except Exception as error:
            if id(error) == self._told or _is_of_a_signal(error):
                raise
            self._fail(error)

    def answered(self, question: Callable[..., bool], *given: Any) -> bool:
        """What the watcher's question comes to; no where it fails."""
        try:
            return question(*given)
        except Exception as error:
            if _is_of_a_signal(error):
                raise
            self._fail(error)
        return False

    def told(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        """A callback of the loop's own: what it raises is for the loop."""

        def tell(step: Any) -> None:
            try:
                callback(step)
            except Exception as error:
                self._told = id(error)
                raise

        return tell

    def _fail(self, error: Exception) -> None:
        # Only text is kept: the error itself holds the frames of a step, and so its tensors.
        at = traceback.extract_tb(error.__traceback__)[-1]
        self.failure = f"{named_error(error)} ({Path(at.filename).name}, line {at.lineno})"
        with contextlib.suppress(Exception):
            self.failed()


def _is_of_a_signal(error: Exception) -> bool:
    """A signal's handler of the loop's own has raised it, as for a time limit: that may be anywhere."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
