"""Files that a script writes over when it is started again: each is kept as it was before, and put back in the end.

A script that trained all night has left its log and its checkpoints; started again for a captured step it would begin
them anew. The process that starts it keeps a copy of each regular file that Python or torch is about to open for
writing, to remove or to rename; the one that has started that process puts them back when it has ended, however.
New files stay. What a library writes from C is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ampdbg.escapes import printable
from ampdbg.files import temporary_folder
from ampdbg.probes.seams import replaced
from ampdbg.quantities import listed

FOLDER = "AMPDBG_KEPT_FILES"
"""The name in the environment under which processes find where they are to keep files; theirs inherit it."""

WRITES = os.O_WRONLY | os.O_RDWR

NEW = ".new"
"""How the mark of a file ends that was not there before: it is not kept when it is written again, or removed."""

CACHES = ("__pycache__", "site-packages")
"""Folders of files that Python itself may write at any time."""


@contextlib.contextmanager
def files_put_back(told: Callable[[str], None]) -> Iterator[None]:
    """While this is entered, processes that are started keep what they would write over; afterwards it is put back.

    Args:
        told: called with a sentence where any was.
    """
    with temporary_folder() as folder:
        before = os.environ.get(FOLDER)
        os.environ[FOLDER] = str(folder)
        try:
            yield
        finally:
            os.environ.pop(FOLDER)
            if before is not None:
                os.environ[FOLDER] = before
            _put_back(folder, told)


def _put_back(folder: Path, told: Callable[[str], None]) -> None:
    names, lost = [], []
    for entry in sorted(folder.glob("*.json")):
        path = Path(json.loads(entry.read_text(encoding="utf-8")))
        copy = entry.with_suffix("")
        try:
            if not _is_as(copy, path):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(copy, path)
                names.append(printable(path.name))
            shutil.copystat(copy, path)
        except OSError as error:
            lost.append(f"{printable(str(path))}: {error.strerror or error}")
    if names:
        told(f"put back as before: {listed(sorted(names))}; the script, started again, had written over it")
    for why in lost:
        told(f"not put back as before, though the script, started again, has written over it: {why}")


def _is_as(copy: Path, path: Path) -> bool:
    """Whether a file is as it was kept."""
    if not path.is_file() or path.stat().st_size != copy.stat().st_size:
        return False
    with copy.open("rb") as one, path.open("rb") as other:
        pieces = functools.partial(one.read, 2**20)
        return all(piece == other.read(2**20) for piece in iter(pieces, b""))


@contextlib.contextmanager
def keeping_files() -> Iterator[None]:
    """While this is entered, this process keeps what it writes over, where it was started to do so.

    A file that cannot be kept is not written: the call raises the OSError of its copy.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    kept = _KeptFiles(Path(folder))
    sys.addaudithook(kept.audited)  # Python takes none back
    with contextlib.ExitStack() as stack:
        stack.callback(kept.end)
        stack.enter_context(replaced(torch, "save", kept.before("f", 1)))
        stack.enter_context(replaced(safetensors.torch, "save_file", kept.before("filename", 1)))
        yield


class _KeptFiles:
    """Those of one process, in a folder that it shares with those that it starts; who is first keeps a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = threading.local()
        self._is_over = False

    def end(self) -> None:
        """Keeps none from now on."""
        self._is_over = True

    def before(self, name: str, position: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """For a function that writes from C: the file that it is given is kept before."""

        def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._keep(args[position] if len(args) > position else kwargs.get(name))
                return original(*args, **kwargs)

            return call

        return replacement

    def audited(self, event: str, args: tuple[Any, ...]) -> None:
        """Python tells of what it is about to do."""
        if self._is_over or event not in _TOUCHED:
            return
        for path in _TOUCHED[event](args):
            self._keep(path)

    def _keep(self, path: Any) -> None:
        if self._is_over or not isinstance(path, (str, bytes, os.PathLike)) or getattr(self._own, "keeps", False):
            return
        self._own.keeps = True  # what follows opens files itself
        try:
            real = os.path.realpath(os.fsdecode(path))
            if not self._folder.is_dir():  # who has started this has ended
                return
            if not os.path.lexists(real):
                self._named(Path(real)).with_suffix(NEW).touch()
            for file in _files_at(real):
                self._copy(file)
        finally:
            self._own.keeps = False

    def _named(self, file: Path) -> Path:
        """Where the copy of a file stands; beside it, with endings of their own, is what is known of it."""
        return self._folder / hashlib.sha256(os.fsencode(file)).hexdigest()

    def _copy(self, file: Path) -> None:
        copy = self._named(file)
        entry = copy.with_suffix(".json")
        is_known = entry.exists() or copy.with_suffix(NEW).exists()
        if is_known or self._folder in file.parents or not set(CACHES).isdisjoint(file.parts):
            return
        mine = copy.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        shutil.copy2(file, mine)
        with contextlib.suppress(FileExistsError):  # another process has kept it, and may have written it since
            os.link(mine, copy)
        mine.unlink()  # another name of the copy
        mine.write_text(json.dumps(str(file)), encoding="utf-8")
        mine.replace(entry)


def _files_at(path: str) -> list[Path]:
    """The regular files at a path: itself, or all in a folder."""
    if os.path.isdir(path):
        return [Path(root, name) for root, _, names in os.walk(path) for name in names if _is_regular(root, name)]
    return [Path(path)] if os.path.isfile(path) else []


def _is_regular(root: str, name: str) -> bool:
    path = os.path.join(root, name)
    return os.path.isfile(path) and not os.path.islink(path)


def _opened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    path, _, flags = args
    return (path,) if isinstance(flags, int) and flags & WRITES else ()


_TOUCHED: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "open": _opened,
    "os.truncate": lambda args: args[:1],
    "os.remove": lambda args: args[:1] if args[1] == -1 else (),  # with a folder's descriptor: from shutil.rmtree
    "os.rename": lambda args: args[:2],
    "shutil.rmtree": lambda args: args[:1],
    "sqlite3.connect": lambda args: args[:1],
}
"""Of the events that tell of a file which is about to change, its paths."""
