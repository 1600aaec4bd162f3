"""Run user code with its folders importable, and report its exceptions without frames of ampdbg and torch."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ampdbg.errors import AmpdbgError, UserCodeError, named_error
from ampdbg.obstacles import obstacle_in
from ampdbg.source.ownership import is_ampdbgs, is_part_of, is_users_file

# Tracebacks omit frames of these modules between two user frames. torch._ops calls the emulated kernels.
_PLUMBING = ("importlib", "_frozen_importlib", "torch.amp", "torch.utils._contextlib", "torch._ops")
_PLUMBING_FUNCTIONS = ("_call_impl", "_wrapped_call_impl")

FFT_ERRORS = ("Unsupported dtype Half", "powers of two when computing in half precision")
"""Errors of torch.fft for half tensors, on a CPU and on CUDA."""

NO_HALF_FFT = (
    "under autocast a layer's output is half; torch's FFT takes half only on CUDA, and only for powers of two: "
    "cast it up first, as in torch.fft.rfft(x.float())"
)

MOST_SHOWN = 500
"""The most characters of an exception in the message. The traceback shows all."""


@dataclass(frozen=True)
class UserCode:
    """Makes folders importable while user code runs.

    ``folders`` come first on ``sys.path``, as a script's own folder does. ``start`` comes last: the working folder
    when ampdbg started.
    """

    folders: tuple[Path, ...]
    start: Path = field(default_factory=Path.cwd)

    @contextlib.contextmanager
    def running(self, doing: str, *, details: Callable[[], str] = str) -> Iterator[None]:
        """Wrap a call into user code. ``doing`` starts the error message, the result of ``details`` ends it.

        Raises:
            UserCodeError: the code raised, even SystemExit or another BaseException, which is the ``__cause__``.
                KeyboardInterrupt and ampdbg's own errors propagate unchanged.
        """
        before, after = [str(folder) for folder in self.folders], str(self.start)
        sys.path[:] = [*before, *sys.path, after]
        try:
            yield
        except (AmpdbgError, KeyboardInterrupt):
            raise
        except BaseException as caught:  # noqa: BLE001 - it becomes the cause of a UserCodeError
            error = _readable(caught)
            message = "\n".join(part for part in (f"{doing} raised {_in_a_line(error)}", details()) if part)
            raise UserCodeError(message, user_traceback(error)) from error
        finally:
            # The user's code may have removed some entries itself.
            for entry in before:
                with contextlib.suppress(ValueError):
                    sys.path.remove(entry)
            if after in sys.path:
                del sys.path[-1 - sys.path[::-1].index(after)]

    @contextlib.contextmanager
    def reading(self, doing: str) -> Iterator[None]:
        """Wrap ampdbg code that may run user code on the way, such as ``parameters()`` or a property.

        Raises:
            UserCodeError: an exception was raised in a file of the user's.
        """
        try:
            yield
        except (AmpdbgError, KeyboardInterrupt):
            raise
        except BaseException as caught:
            error = _readable(caught)
            # A generator of ampdbg around the user's turns a StopIteration into a RuntimeError.
            raised = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
            if not _came_from_users(raised):
                raise
            raise UserCodeError(f"{doing} raised {_in_a_line(raised)}", user_traceback(raised)) from raised


def _readable(error: BaseException) -> BaseException:
    """Return the exception being handled, or a replacement if its class prevents reading its attributes."""
    kind, _, came_through = sys.exc_info()
    try:
        error.__class__, error.__traceback__, error.__cause__, error.__context__  # noqa: B018 - the user's may raise
        type(error).__name__, type(error).__qualname__, type(error).__module__
    except Exception:  # noqa: BLE001 - Python itself cannot print such an exception
        name = type.__getattribute__(kind, "__name__") if kind is not None else "an exception"
        return RuntimeError(f"an exception, {name}, whose attributes cannot be read").with_traceback(came_through)
    return error


def user_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without frames of ampdbg, the import system and torch.

    If torch raised the error, its innermost frame is kept: it shows the called op.
    """
    report = traceback.TracebackException.from_exception(error)
    _filter(report, error)
    return "".join(report.format()).encode("utf-8", "replace").decode("utf-8")


def _came_from_users(error: BaseException) -> bool:
    """True if the error was raised below a user's line that ampdbg had called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = max((index for index, frame in enumerate(frames) if is_ampdbgs(frame)), default=-1)
    return any(is_users_file(frame.f_code.co_filename) for frame in frames[last + 1 :])


def _filter(report: traceback.TracebackException, error: BaseException) -> None:
    waiting: list[tuple[Any, Any]] = [(report, error)]
    while waiting:  # not recursive: a retry loop can chain thousands of exceptions
        part, raised = waiting.pop()
        frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)]
        shown = [(line, frame) for line, frame in zip(part.stack, frames, strict=False) if not _is_plumbing(frame)]
        kept = [line for line, frame in shown if frame is shown[-1][1] or not is_part_of(frame, "torch")]
        # format() prints a heading for an empty list but not for None.
        vars(part)["stack"] = traceback.StackSummary.from_list(kept) if kept else None
        parts = getattr(part, "exceptions", None)  # of the report: any error class may define that name itself
        inner = zip(parts, raised.exceptions, strict=False) if parts else ()
        chained = (part.__cause__, raised.__cause__), (part.__context__, raised.__context__), *inner
        waiting += [pair for pair in chained if pair[0] is not None]


def _is_plumbing(frame: FrameType) -> bool:
    is_call = frame.f_code.co_name in _PLUMBING_FUNCTIONS and is_part_of(frame, "torch")
    return is_ampdbgs(frame) or is_part_of(frame, *_PLUMBING) or is_call


def _in_a_line(error: BaseException) -> str:
    line = named_error(error)[:MOST_SHOWN]
    if isinstance(error, SystemExit):
        return f'{line}; put code that only the script should run under `if __name__ == "__main__":`'
    obstacle = obstacle_in(line)
    if obstacle is not None and obstacle.install:
        return f"{line}. {obstacle.says} Next: {obstacle.install}"
    return f"{line}; {NO_HALF_FFT}" if any(text in line for text in FFT_ERRORS) else line
