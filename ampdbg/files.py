"""Files read up to a limit, and written whole: new content takes a file's place in one step, or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import stat
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".ampdbg-temporary-"
"""What the names of temporary files and folders begin with: none of a user's may."""

LETTERS = string.ascii_uppercase + string.digits
"""What the marks of temporary folders are made of: Python's own names of chance have no such letters."""

marks: set[str] = set()
"""Those of the folders that this process has made, or works for: what has them in its name is ours."""

ABANDONED = 60.0
"""Seconds after which one that nobody holds was left by a process that was killed."""

LOCKED = 2.0
"""Seconds within which a process that has made a folder holds its lock, with much to spare."""


def free_path(folder: Path, begin: str, end: str) -> Path:
    """``begin`` and ``end`` as a name in a folder, with a number between them where another process has taken it.

    An empty file holds the name.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / f"{begin}{'' if number == 1 else f'-{number}'}{end}"
        with contextlib.suppress(FileExistsError), path.open("x"):
            break
    return path


@contextlib.contextmanager
def staged_file(path: Path, content: bytes) -> Iterator[Path]:
    """The name of a temporary file with ``content`` in the folder of ``path``; gone afterwards, as are abandoned ones.

    It has the permissions of ``path``; where no file is there, or a link to one, those of any new file.

    Raises:
        OSError: the folder cannot be written, or the disk is full; it names ``path``.
    """
    _remove_abandoned(path.parent)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}")
    try:
        try:
            with temporary.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        with _held(temporary):
            if path.is_file() and not path.is_symlink():
                shutil.copymode(path, temporary)
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards; first go those that killed processes have left.

    Files and semaphores that have its mark in their names go with it.
    """
    mark = "".join(secrets.choice(LETTERS) for _ in range(6))
    marks.add(mark)
    folder = Path(tempfile.gettempdir(), TEMPORARY + mark)
    try:  # begins before the folder is there: Ctrl-C may fall into the very call that makes it
        folder.mkdir(mode=0o700)
        with _held(folder):
            _remove_abandoned(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for place in (folder.parent, Path("/dev/shm")):
            for other in place.glob(f"*{mark}*"):
                with contextlib.suppress(OSError):
                    shutil.rmtree(other) if other.is_dir() and not other.is_symlink() else other.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Removes the temporary files and folders there that killed processes have left."""
    for other in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), _held(other) as is_held:
            age = time.time() - other.stat().st_mtime
            if is_held and age > (min(ABANDONED, LOCKED) if other.is_dir() else ABANDONED):
                shutil.rmtree(other, ignore_errors=True) if other.is_dir() else other.unlink()


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Holds the lock of a file or folder, which the system frees with the process; False where that cannot be."""
    with contextlib.ExitStack() as stack:
        is_held = False
        if sys.platform != "win32":
            import fcntl

            with contextlib.suppress(OSError):  # another holds it, or the file system has no locks
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
        yield is_held


def read_file(path: Path, most: int) -> bytes:
    """The content of a file of at most so many bytes; of a pipe, what is written to it.

    Raises:
        OSError: it cannot be read, is larger, is a device, which may have no end, or a pipe that nobody writes to.
    """
    at_once = getattr(os, "O_NONBLOCK", 0)  # else a pipe would wait for its writer, for ever where there is none
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once)) as stream:
        kind = os.fstat(stream.fileno()).st_mode
        if stat.S_ISCHR(kind):
            raise OSError(errno.EINVAL, "a device; needed: a file")
        if stat.S_ISFIFO(kind):
            os.set_blocking(stream.fileno(), True)
        content = stream.read(most + 1)
    if not content and stat.S_ISFIFO(kind):
        raise OSError(errno.EINVAL, "a pipe that nobody writes to; needed: a file")
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes")
    return content


def obstacle(path: Path) -> str:
    """What is there that no file can be written over, and "" where one can be.

    A pipe would wait for its reader. A device is written to, and the pipe that is stdout: its path leads nowhere.
    """
    real = os.path.realpath(path)
    if os.path.islink(real):
        return "a link that leads to itself"
    if not os.path.exists(real) or os.path.isfile(real) or Path(real).is_char_device():
        return ""
    return "a pipe" if Path(real).is_fifo() else "a folder" if os.path.isdir(real) else "no file"


def replace_file(path: Path, content: bytes) -> None:
    """Makes ``path`` hold ``content`` in one step: a reader sees the old file or the whole new one.

    Permissions, owner and links stay. A pipe or a device, such as ``/dev/stdout``, is written to, never replaced.

    Raises:
        OSError: it cannot be written; a file is as it was.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if path.exists() and not path.is_file():  # the path of a pipe that is stdout leads nowhere once it is resolved
        path.write_bytes(content)
        return
    with staged_file(target, content) as temporary:
        put(temporary, target)


def replace_name(path: Path, content: bytes) -> None:
    """As :func:`replace_file`, but whatever ``path`` names is let go: a link, and what it leads to stays as it was.

    For a name that no user has chosen: others may have put a link there, which is not to be written through.

    Raises:
        OSError: it cannot be written, or is a folder; what was there is as it was.
    """
    with staged_file(path, content) as temporary:
        os.replace(temporary, path)


def put(temporary: Path, target: Path) -> None:
    """Gives a staged file's content to ``target`` in one step.

    A file that has other names (hard links) or another owner is written over: a new file in its place would not have.
    """
    there = target.stat() if target.exists() else None
    if there is not None and (there.st_nlink > 1 or there.st_uid != temporary.stat().st_uid):
        shutil.copyfile(temporary, target)
    else:
        os.replace(temporary, target)
