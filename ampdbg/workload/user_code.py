"""Running the user's own code: its folders importable, its exceptions shown without the frames of ampdbg and torch."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ampdbg.errors import AmpdbgError, UserCodeError

_TORCH = str(Path(torch.__file__).parent) + os.sep
# What stands between two frames of the user's and says nothing about either.
_PLUMBING_FILES = (
    str(Path(__file__).parent.parent) + os.sep,
    "<frozen importlib",
    str(Path(importlib.__file__).parent) + os.sep,
    _TORCH + os.path.join("amp", ""),
    _TORCH + os.path.join("utils", "_contextlib.py"),
    _TORCH + "_ops.py",  # the dispatcher, which the emulated kernels are called through
)
_PLUMBING_FUNCTIONS = ("_call_impl", "_wrapped_call_impl")


@dataclass(frozen=True)
class UserCode:
    """``folders`` are importable while the user's code runs, before everything else, as a script's own folder is.

    The working folder is too, after everything else.
    """

    folders: tuple[Path, ...]

    @contextlib.contextmanager
    def running(self, doing: str, *, details: Callable[[], str] = str) -> Iterator[None]:
        """Wraps a call into the user's code; ``doing`` starts the message, what ``details`` returns ends it.

        Raises:
            UserCodeError: the code raised (also SystemExit); the exception is its ``__cause__``.
                KeyboardInterrupt passes through, and so do ampdbg's own errors.
        """
        with self._importable():
            try:
                yield
            except AmpdbgError:
                raise
            except (Exception, SystemExit) as error:
                message = "\n".join(part for part in (f"{doing} raised {_in_a_line(error)}", details()) if part)
                raise UserCodeError(message, user_traceback(error)) from error

    @contextlib.contextmanager
    def _importable(self) -> Iterator[None]:
        before = [str(folder) for folder in self.folders]
        after = [""]
        sys.path[:] = [*before, *sys.path, *after]
        try:
            yield
        finally:
            for entry in before:
                _discard(sys.path, entry, from_the_end=False)
            for entry in after:
                _discard(sys.path, entry, from_the_end=True)


def user_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, less the frames of ampdbg, of the import system and of torch.

    The innermost of torch's stays when the error was raised there: the op that was called.
    """
    report = traceback.TracebackException.from_exception(error)
    _filter(report)
    return "".join(report.format())


def _filter(report: traceback.TracebackException | None) -> None:
    if report is None:
        return
    frames = [frame for frame in report.stack if not _is_plumbing(frame)]
    kept = [frame for frame in frames if frame is frames[-1] or not frame.filename.startswith(_TORCH)]
    # An empty list would print a heading above nothing; format() leaves the heading out for None.
    vars(report)["stack"] = traceback.StackSummary.from_list(kept) if kept else None
    for inner in (report.__cause__, report.__context__, *(getattr(report, "exceptions", None) or ())):
        _filter(inner)


def _is_plumbing(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PLUMBING_FILES) or (
        frame.filename.startswith(_TORCH) and frame.name in _PLUMBING_FUNCTIONS
    )


def _in_a_line(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SystemExit):
        return f'{line}; keep what a script does when it is run under `if __name__ == "__main__":`'
    return line


def _discard(path: list[str], entry: str, *, from_the_end: bool) -> None:
    """Takes one ``entry`` out, if the user's code has not done so itself."""
    if entry in path:
        index = len(path) - 1 - path[::-1].index(entry) if from_the_end else path.index(entry)
        del path[index]
