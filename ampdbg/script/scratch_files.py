"""Files that a script would write over when it is started again: it writes copies of them, and does not know.

A script that has trained all night has left its log and its checkpoints, and may be training on; started again for a
captured step it would begin them anew. What Python or torch opens for writing, removes or renames, and what was there
before, stays as it is. New files are made where they belong, and go again when the step is found: a script that is
started once more, as for a proof, would find them and go on from them, or refuse. One that another process has made
or written since is that one's, and stays. What a library writes from C, or another process, is not seen.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WRITES, CREATES_ONLY = os.O_WRONLY | os.O_RDWR, os.O_CREAT | os.O_EXCL

CACHES = {"__pycache__", "site-packages"}
"""Folders of files that any process of Python's may write."""

Function = Callable[..., Any]


def beside(result: Path) -> Path:
    """The folder for them of a process that leaves a result: it goes with that."""
    return result.with_name("scratch")


class ScratchFiles:
    """Those of one process. A file that it has made itself is its own, and written like any other."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._working_folder = os.path.realpath(os.getcwd())
        self._unlink, self._rmdir = os.unlink, os.rmdir
        self._copies: dict[str, str] = {}
        self._own: dict[str, _Mark | None] = {}
        """What it has made, by its path; None where no more is known of it."""
        self._gone: set[str] = set()
        self._moved: dict[str, str] = {}
        """Folders in the place of those that only seem to be removed, and where they are."""
        self._numbers = itertools.count()

    def remove_new(self) -> None:
        """Removes what this process has made below the working folder: files, and folders that are empty by then."""
        for path in sorted(self._own, key=len, reverse=True):
            is_below = path.startswith(self._working_folder + os.sep) and CACHES.isdisjoint(Path(path).parts)
            if is_below and self._has_made(path) and not path.startswith(self._folder + os.sep):
                with contextlib.suppress(OSError):  # it is gone, or holds what is another's
                    (self._rmdir if os.path.isdir(path) and not os.path.islink(path) else self._unlink)(path)

    def check_write(self, file: Any) -> None:
        """Raises PermissionError where this would write over what was there before."""
        real = _real(self._to_make(file))
        if real is not None and self._own.get(real, self) is None and os.path.isfile(real):
            self._note(real)
        if real is None or not os.path.isfile(real) or self._is_own(real) or not CACHES.isdisjoint(Path(real).parts):
            return
        why = "kept as it is while ampdbg starts the script again, and opened in a way that cannot be led to a copy"
        raise PermissionError(errno.EACCES, why, real)

    def opening(self, original: Function) -> Function:
        """For ``open(file, mode)``."""

        def call(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and not {"w", "a", "+", "x"}.isdisjoint(mode):
                file = self._to_make_anew(file) if "x" in mode else self._to_write(file, is_kept="w" not in mode)
            elif self._copies or self._moved:
                file = self._to_read(file)
            opened = original(file, mode, *args, **kwargs)
            self._note(file)
            return opened

        return call

    def opening_a_descriptor(self, original: Function) -> Function:
        """For ``os.open(path, flags)``."""

        def call(path: Any, flags: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(flags, int):
                path = _from(kwargs, path)
                if flags & CREATES_ONLY == CREATES_ONLY:
                    path = self._to_make_anew(path)
                elif flags & (WRITES | os.O_TRUNC):
                    path = self._to_write(path, is_kept=not flags & os.O_TRUNC)
                else:
                    path = self._to_read(path)
            opened = original(path, flags, *args, **kwargs)
            self._note(path)
            return opened

        return call

    def writing(
        self, name: str, position: int, *, is_kept: bool = False, is_written: bool = True
    ) -> Callable[[Function], Function]:
        """For a function that is given the file to write by this name, or at this position.

        With ``is_kept`` it alters what is in it, or about it; ``is_written`` says that it writes all before it returns.
        """

        def replacement(original: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                given, file = list(args), None
                if len(given) > position:
                    file = given[position] = self._to_write(given[position], is_kept=is_kept)
                elif name in kwargs:
                    file = kwargs[name] = self._to_write(kwargs[name], is_kept=is_kept)
                try:
                    return original(*given, **kwargs)
                finally:
                    self._note(file, is_written=is_written and not is_kept)

            return call

        return replacement

    def reading(self, original: Function) -> Function:
        """For a function that is given the file to read, before all else."""

        def call(file: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self._to_read(file), *args, **kwargs)

        return call

    def mapping(self, original: Function) -> Function:
        """For ``torch.from_file(filename, shared)``: a tensor that is shared writes into the file."""

        def call(filename: Any, shared: Any = False, *args: Any, **kwargs: Any) -> Any:
            file = self._to_write(filename, is_kept=True) if shared else self._to_read(filename)
            return original(file, shared, *args, **kwargs)

        return call

    def removing(self, original: Function) -> Function:
        """For ``os.remove(path)``: what was there stays."""

        def call(path: Any, **kwargs: Any) -> None:
            path = _from(kwargs, path)
            if not self._is_kept(path):
                name = os.path.abspath(os.fsdecode(path))
                name = name if name in self._own else _real(path) or name  # a link of its own, and not what it leads to
                original(self._as_it_is(path), **kwargs)
                self._own.pop(name, None)
            else:
                self._gone.add(os.path.abspath(os.fsdecode(path)))

        return call

    def linking(self, original: Function) -> Function:
        """For ``os.symlink(src, dst)``: in the place of what only seems to be removed none is made."""

        def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            link = os.path.abspath(os.fsdecode(dst))
            if link not in self._gone:
                original(src, dst, *args, **kwargs)
                self._own[link] = _Mark.of(link)

        return call

    def sharing(self, original: Function) -> Function:
        """For ``os.link(src, dst)``: of what was there a copy gets the second name, which may be written to."""

        def call(src: Any, dst: Any, **kwargs: Any) -> None:
            src, dst = _from(kwargs, src, "src_dir_fd"), _from(kwargs, dst, "dst_dir_fd")
            to = self._to_make_anew(dst)
            if self._is_kept(src) and not os.path.lexists(to):
                shutil.copy2(self._to_read(src), to)
            else:
                original(self._to_read(src), to, **kwargs)
            self._note(to)

        return call

    def renaming(self, original: Function) -> Function:
        """For ``os.rename(src, dst)``: of what was there a copy gets the new name.

        Where a folder takes the place of one that only seems to be removed, it is another one of that name from now on.
        """

        def call(src: Any, dst: Any, **kwargs: Any) -> None:
            src, dst = _from(kwargs, src, "src_dir_fd"), _from(kwargs, dst, "dst_dir_fd")
            is_kept = self._is_kept(src)
            if self._leads_on(src, dst, is_kept=is_kept):
                return
            to = self._to_write(dst, is_kept=False)
            if not is_kept:
                real_src = _real(self._as_it_is(src))
                original(self._as_it_is(src), to, **kwargs)
                self._note_moved(real_src, _real(to))
            elif os.path.isfile(self._to_read(src)):
                shutil.copy2(self._to_read(src), to)
                self._note(to, is_written=True)

        return call

    def _leads_on(self, src: Any, dst: Any, *, is_kept: bool) -> bool:
        """Makes the name ``dst`` lead to a folder, where it cannot be renamed; what has the old name seems removed."""
        name, now, real = _real(src), self._as_it_is(src), _real(dst)
        if name is None or real is None or not os.path.isdir(now):
            return False
        if real in self._gone and os.path.isdir(real):
            self._gone.remove(real)
            os.makedirs(self._folder, exist_ok=True)
            to = os.path.join(self._folder, f"{next(self._numbers)}-{os.path.basename(real)}.d")
            (shutil.copytree if is_kept else shutil.move)(now, to)
        elif (is_kept or name in self._moved) and not os.path.lexists(real):
            to = os.path.realpath(now)
        else:
            return False
        self._give_up(name)
        self._moved[real] = to
        return True

    def _give_up(self, name: str) -> None:
        """The name leads nowhere else any more, and the folder that has it only seems to be removed."""
        self._moved.pop(name, None)
        if os.path.isdir(name):
            self._gone.add(name)

    def removing_a_folder(self, original: Function) -> Function:
        """For ``os.rmdir(path)`` and ``shutil.rmtree(path)``: a folder that was there stays, with all that is in it."""

        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            real = _real(path)
            is_there = real in self._moved or os.path.isdir(real or "")
            if real is None or kwargs.get("dir_fd") is not None or not is_there or self._is_own(real):
                original(path, *args, **kwargs)
            else:
                self._give_up(real)

        return call

    def making_a_folder(self, original: Function) -> Function:
        """For ``os.mkdir(path)``: one that only seems to be removed is there."""

        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            real = _real(path)
            gone = {real, *map(str, Path(real or "").parents)} & self._gone
            if gone and os.path.isdir(real or ""):
                self._gone.discard(real or "")
                return
            original(path, *args, **kwargs)
            self._own[real or ""] = _Mark.of(real or "")

        return call

    def _to_write(self, file: Any, *, is_kept: bool) -> Any:
        """What to write in the place of a file; with ``is_kept`` it holds what that does."""
        file = self._to_make(file)
        real = _real(file)
        if real is None or self._is_own(real) or not os.path.isfile(real) or not CACHES.isdisjoint(Path(real).parts):
            return file
        if real not in self._copies:
            os.makedirs(self._folder, exist_ok=True)
            copy = os.path.join(self._folder, f"{len(self._copies)}-{os.path.basename(real)}")
            # As long as it is not yet the file's place to be read.
            shutil.copy2(real, copy) if is_kept else Path(copy).touch()
            self._copies[real] = copy
        return self._copies[real]

    def _to_make(self, file: Any) -> Any:
        """What to open where a file is to be made that is not there yet; else that is an error of the script's."""
        file = self._as_it_is(file)
        real = _real(file)
        if real is not None and not os.path.lexists(real):
            self._own[real] = None
        return file

    def _note(self, file: Any, *, is_written: bool = False) -> None:
        """How a file that is its own is known from now on; with ``is_written`` nothing more is written into it."""
        real = _real(file)
        if real in self._own:
            self._own[real] = _Mark.of(real, is_written=is_written)

    def _note_moved(self, src: str | None, dst: str | None) -> None:
        moved = [path for path in self._own if src and (path == src or path.startswith(src + os.sep))]
        for path in moved:
            self._own[f"{dst}{path[len(src or '') :]}"] = self._own.pop(path)
        if src not in moved:
            self._note(dst)

    def _has_made(self, path: str) -> bool:
        """Whether what is there now is still what this process has made."""
        mark = self._own.get(path)
        return mark is not None and mark == _Mark.of(path, is_written=mark.written is not None)

    def _to_make_anew(self, file: Any) -> Any:
        """The same; what only seems to be removed is made at a place of its own."""
        real = _real(file)
        if real not in self._gone or not os.path.isfile(real or ""):
            return self._to_make(file)
        copy = self._to_write(file, is_kept=False)
        with contextlib.suppress(OSError):
            self._unlink(copy)
        self._gone.discard(real or "")
        return copy

    def _to_read(self, file: Any) -> Any:
        file = self._as_it_is(file)
        return self._copies.get(_real(file) or "", file)

    def _as_it_is(self, path: Any) -> Any:
        """The path, or where it is now in a folder that has been moved."""
        real = _real(path) if self._moved else None
        for folder, now in self._moved.items():
            if real is not None and (real == folder or real.startswith(folder + os.sep)):
                return now + real[len(folder) :]
        return path

    def _is_kept(self, path: Any) -> bool:
        """Whether a file or folder was there before this process."""
        real = _real(self._as_it_is(path))
        return real is not None and os.path.lexists(real) and not self._is_own(real)

    def _is_own(self, real: str) -> bool:
        if self._own.get(real) is not None:
            return self._has_made(real)
        return real.startswith(self._folder + os.sep) or any(self._has_made(str(path)) for path in Path(real).parents)


class _Mark(NamedTuple):
    """By what a file is known that is written where another process may write as well."""

    device: int
    inode: int
    written: tuple[int, int] | None
    """When, and how many bytes; None as long as it may still be written."""

    @classmethod
    def of(cls, path: str, *, is_written: bool = False) -> _Mark | None:
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            return cls(found.st_dev, found.st_ino, (found.st_mtime_ns, found.st_size) if is_written else None)
        return None


def _real(path: Any) -> str | None:
    """The path without links; None of a descriptor, and of what is no path."""
    return os.path.realpath(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else None


def _from(kwargs: dict[str, Any], path: Any, name: str = "dir_fd") -> Any:
    """A path from the folder of a descriptor, which is taken out of ``kwargs`` where that can be told."""
    folder = kwargs.get(name)
    link = f"/proc/self/fd/{folder}"
    if folder is None or not isinstance(path, (str, bytes, os.PathLike)) or not os.path.exists(link):
        return path
    del kwargs[name]
    return os.path.join(os.readlink(link), os.fsdecode(path))
