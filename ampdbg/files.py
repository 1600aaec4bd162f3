"""Read files up to a size limit, and write files whole: new content replaces a file in one step or not at all."""

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
"""The prefix of temporary files and folders, which no user file may have."""

LETTERS = string.ascii_uppercase + string.digits
"""The characters of the random marks of temporary folders: Python's own random names have no uppercase letters."""

marks: set[str] = set()
"""The marks of folders that this process has made or works for; a name that contains one is ampdbg's own."""

ABANDONED = 60.0
"""Seconds after which a temporary file without a lock was left by a killed process."""

LOCKED = 2.0
"""Seconds within which a process locks a folder that it has made, with a wide margin."""


def free_path(folder: Path, begin: str, end: str) -> Path:
    """Return the path of ``begin`` + ``end`` in a folder, with a number between them if the name is taken.

    An empty file reserves the name.

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
    """Yield a temporary file with ``content`` beside ``path``, and remove it afterwards.

    It has the permissions of ``path``, or a new file's if that is missing or a link. Abandoned files are removed first.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the error names ``path``.
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
    """Yield a temporary folder, and remove it afterwards; first remove folders that killed processes have left.

    Files and semaphores with its mark in their names are removed with it.
    """
    mark = "".join(secrets.choice(LETTERS) for _ in range(6))
    marks.add(mark)
    folder = Path(tempfile.gettempdir(), TEMPORARY + mark)
    try:  # begins before the folder is there: Ctrl-C may interrupt the call that makes it
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
    """Remove the temporary files and folders in ``folder`` that killed processes have left."""
    for other in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), _held(other) as is_held:
            age = time.time() - other.stat().st_mtime
            if is_held and age > (min(ABANDONED, LOCKED) if other.is_dir() else ABANDONED):
                shutil.rmtree(other, ignore_errors=True) if other.is_dir() else other.unlink()


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Lock a file or folder until the block or the process ends; yield False if it cannot be locked."""
    with contextlib.ExitStack() as stack:
        is_held = False
        if sys.platform != "win32":
            import fcntl

            with contextlib.suppress(OSError):  # another process holds it, or the file system has no locks
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe would wait for a writer
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
        yield is_held


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a file of at most ``most`` bytes; of a pipe, what is written to it.

    Raises:
        OSError: the file cannot be read, is larger, or is a device, which may have no end; or a pipe has no writer.
    """
    at_once = getattr(os, "O_NONBLOCK", 0)  # else a pipe would wait for its writer, without end if it has none
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
    """Return what prevents writing to ``path``, such as "a folder"; "" if nothing does.

    A pipe would wait for its reader. A device is allowed, and so is stdout as a pipe: its path does not resolve.
    """
    real = os.path.realpath(path)
    if os.path.islink(real):
        return "a link that leads to itself"
    if not os.path.exists(real) or os.path.isfile(real) or Path(real).is_char_device():
        return ""
    return "a pipe" if Path(real).is_fifo() else "a folder" if os.path.isdir(real) else "no file"


def replace_file(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content`` in one step: a reader sees the old file or the whole new one.

    Permissions, owner and links stay. A pipe or a device, such as ``/dev/stdout``, is written to, never replaced.

    Raises:
        OSError: the path cannot be written; an existing file is unchanged.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if path.exists() and not path.is_file():  # the path of a pipe that is stdout does not exist once resolved
        path.write_bytes(content)
        return
    with staged_file(target, content) as temporary:
        put(temporary, target)


def replace_name(path: Path, content: bytes) -> None:
    """Replace ``path`` as :func:`replace_file` does, but replace a link itself; its target is unchanged.

    For names that no user has chosen. Another user may have put a link there, and ampdbg must not write through it.

    Raises:
        OSError: the path cannot be written, or is a folder; nothing has changed.
    """
    with staged_file(path, content) as temporary:
        os.replace(temporary, path)


def put(temporary: Path, target: Path) -> None:
    """Move the content of a staged file to ``target`` in one step.

    A file with other names (hard links) or another owner is overwritten instead: a new file would lose them.
    """
    there = target.stat() if target.exists() else None
    if there is not None and (there.st_nlink > 1 or there.st_uid != temporary.stat().st_uid):
        shutil.copyfile(temporary, target)
    else:
        os.replace(temporary, target)
