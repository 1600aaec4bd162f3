"""What a script has made under names of chance, in the temporary folder and as semaphores, when it is ended midway.

Python removes it as a script ends, or the script does. Nobody else knows the names, and a script that is started again
finds others: what it has found of before is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

from ampdbg.probes.seams import replaced

LIST = "temporaries"

Function = Callable[..., Any]

_noting: list[Callable[[str], None]] = []


class _Notes:
    """The list, and what stands in the place of the functions that make such things."""

    def __init__(self, files: Path) -> None:
        files.mkdir(exist_ok=True)
        self._list = files / LIST
        self._open = os.open  # a script that is started again has others
        self._folder = os.path.realpath(tempfile.gettempdir())

    def note(self, what: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._open(self._list, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, os.fsencode(what) + b"\0")
            os.close(descriptor)

    def making(self, original: Function) -> Function:
        """For ``tempfile.mkdtemp()``, and what makes a file and returns it behind its descriptor."""

        def call(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            path = os.path.abspath(os.fsdecode(made[1] if isinstance(made, tuple) else made))
            if os.path.realpath(os.path.dirname(path)) == self._folder:  # elsewhere the script has chosen the folder
                self.note(path)
            return made

        return call

    def registering(self, original: Function) -> Function:
        """For what keeps the names that outlive a process."""

        def call(name: str, kind: str) -> None:
            original(name, kind)
            if kind == "semaphore":
                self.note(f"{kind}:{name}")

        return call


@contextlib.contextmanager
def noted_temporaries(files: Path) -> Iterator[None]:
    """While this is entered, a list in the folder ``files`` has what this process and its forks make of that kind."""
    notes = _Notes(files)
    with contextlib.ExitStack() as stack:
        for name in ("mkdtemp", "_mkstemp_inner"):
            if hasattr(tempfile, name):
                stack.enter_context(replaced(tempfile, name, notes.making))
        stack.enter_context(replaced(resource_tracker, "register", notes.registering))
        util.get_temp_dir()  # processes that it starts anew take this one for their own
        _noting.append(notes.note)
        stack.callback(_noting.remove, notes.note)
        yield


def remove_temporaries(files: Path) -> None:
    """Removes what the list in the folder ``files`` has; to be called when the processes that made it have ended.

    A process with a script that is started again removes nothing of others: there that is left to who removes its own.
    """
    with contextlib.suppress(OSError):
        for what in (files / LIST).read_bytes().split(b"\0"):
            kind, _, name = os.fsdecode(what).partition(":")
            if _noting:
                _noting[-1](os.fsdecode(what))
            elif kind == "semaphore":
                _unlink_semaphore(name)
            elif what:
                _remove(os.fsdecode(what))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def _unlink_semaphore(name: str) -> None:
    with contextlib.suppress(ImportError, KeyError, OSError):  # Windows has none; it is gone
        vars(importlib.import_module("multiprocessing.synchronize"))["sem_unlink"](name)
