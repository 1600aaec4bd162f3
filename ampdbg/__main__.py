"""The ``ampdbg`` program, and ``python -m ampdbg``."""

from __future__ import annotations

# Import nothing slow: Ctrl-C prints a traceback until the handler is set. `signal` takes 10 ms.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run the program on ``sys.argv`` and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    _open_closed_streams()
    from ampdbg.commands.app import main as run

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: nothing is lost before a command begins, and a traceback of its imports would not help."""
    os._exit(128 + number)  # 130, as in shells


def _open_closed_streams() -> None:
    """Open the null device as stdout or stderr if the shell has closed it: a file would get its descriptor."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            if null != descriptor:
                os.close(null)
            setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))


if __name__ == "__main__":
    main()
