"""What a file is to hold, written in full beside it: it takes the file's place in one step, or is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staged(path: Path, content: bytes, *, keeps_mode: bool = False) -> Iterator[str]:
    """The name of a temporary file with ``content`` in the folder of ``path``, which is made; gone afterwards.

    ``keeps_mode`` gives it the permissions that ``path`` has, else it has those of any new file.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if keeps_mode:
            shutil.copymode(path, temporary)
        else:
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes the file private
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _umask() -> int:
    """The process's, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
