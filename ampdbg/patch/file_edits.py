"""Edited files as unified diffs, and written: all or none, and uncommitted work is never overwritten."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

from ampdbg.errors import PatchError, reason_of
from ampdbg.files import put, staged_file
from ampdbg.record.pins import FileDiff

CONTEXT = 3
"""Unchanged lines around a change, as git has it."""

NO_NEWLINE = b"\\ No newline at end of file\n"
_HEADING = re.compile(rb"^[ \t]*(class|async[ \t]+def|def)[ \t].*$")
_RANGE = re.compile(rb"@@ -(\d+)")
_ESCAPES = {
    byte: b"\\" + letter for byte, letter in zip(b'"\\\a\b\t\n\v\f\r', map(str.encode, '"\\abtnvfr'), strict=True)
}


@dataclass(frozen=True)
class FileEdit:
    """A file, the bytes that it must hold now and those that it shall have."""

    path: Path
    before: bytes
    after: bytes


def counterpart(line: int, here: bytes, there: bytes) -> int:
    """Which line of ``there`` is line ``line`` of ``here``, be it indented in another way; 0 where none is."""
    return next((at + line - start for start, at, size in _common(here, there) if start < line <= start + size), 0)


@lru_cache(maxsize=8)
def _common(here: bytes, there: bytes) -> Sequence[tuple[int, int, int]]:
    one, other = ([line.strip() for line in source.split(b"\n")] for source in (here, there))
    return difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()


def base_folder(edits: Sequence[FileEdit], config_folder: Path) -> tuple[Path, bool]:
    """What the paths of a diff are relative to, and whether that is the root of a git repository.

    That is the repository around the config and the files, also where the files have one of their own within;
    else the folder that holds them all: the config's own, wherever below it the edits fall.
    """
    files = [edit.path.resolve().parent for edit in edits]
    around = Path(os.path.commonpath([config_folder.resolve(), *files]))
    root = _repository(around)
    return root or around, root is not None


def file_diff(edit: FileEdit, base: Path) -> FileDiff:
    """The edit as a diff whose path counts from ``base``."""
    path = PurePosixPath(edit.path.resolve().relative_to(base).as_posix())
    diff = unified_diff(path, edit.before, edit.after)
    try:
        return FileDiff(str(path), "utf-8", diff.decode("utf-8"))
    except UnicodeDecodeError:
        return FileDiff(str(path), "latin-1", diff.decode("latin-1"))


def _repository(folder: Path) -> Path | None:
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    root = os.fsdecode(done.stdout).removesuffix("\n").removesuffix("\r")
    return Path(root).resolve() if done.returncode == 0 and root else None


def unified_diff(path: PurePosixPath, before: bytes, after: bytes) -> bytes:
    """The change of one file as ``git apply`` and ``patch -p1`` take it, byte for byte; empty where there is none.

    The lines are the file's own bytes, whatever its encoding and line endings, so the diff must be written to a binary
    stream.

    Args:
        path: relative to where the diff is applied.
        before: the file's bytes; ``after`` are those that it shall have.
    """
    if before == after:
        return b""
    old, new = _quoted("a/", path), _quoted("b/", path)
    # A tab ends a name with spaces, which patch would otherwise cut at the first.
    end = b"\t\n" if " " in str(path) else b"\n"
    header = b"diff --git %b %b\n--- %b%b+++ %b%b" % (old, new, old, end, new, end)
    return header + b"".join(_hunks(_lines(before), _lines(after)))


def _quoted(prefix: str, path: PurePosixPath) -> bytes:
    """A path as git writes it: as in C, with quotes and octal numbers, where it holds more than plain characters."""
    name = (prefix + path.as_posix()).encode("utf-8", "surrogateescape")
    escaped = b"".join(_ESCAPES.get(byte, bytes([byte]) if 32 <= byte < 127 else b"\\%03o" % byte) for byte in name)
    return name if escaped == name else b'"' + escaped + b'"'


def _lines(content: bytes) -> list[bytes]:
    """Lines end at a line feed and nowhere else: a form feed or a lone carriage return is part of a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)


def _hunks(before: Sequence[bytes], after: Sequence[bytes]) -> Iterator[bytes]:
    """The hunks, each headed by the class or function above it."""
    # The two lines that name the files come first; git's have more to say.
    for line in islice(difflib.diff_bytes(difflib.unified_diff, before, after, n=CONTEXT), 2, None):
        if (start := _RANGE.match(line)) is not None:
            above = reversed(before[: max(int(start[1]) - 1, 0)])
            heading = next((other for other in above if _HEADING.match(other)), b"").strip()
            yield b" ".join(part for part in (line.strip(), heading) if part) + b"\n"
        else:
            yield line if line.endswith(b"\n") else line + b"\n" + NO_NEWLINE


def write_edits(edits: Sequence[FileEdit], *, force: bool = False) -> None:
    """Writes all files, or none where one of them cannot be.

    Each file is replaced in one step and keeps its permissions and its links.

    Args:
        edits: one for each file.
        force: also writes files in which git sees changes that are not committed.

    Raises:
        PatchError: a file is not as the edit expects it, has uncommitted changes, or cannot be written.
    """
    edits = [FileEdit(edit.path.resolve(), edit.before, edit.after) for edit in edits]
    for edit in edits:
        _check_content(edit)
    if not force:
        _check_committed([edit.path for edit in edits])
    done: list[FileEdit] = []
    try:
        with contextlib.ExitStack() as stack:
            staged = [(edit, stack.enter_context(staged_file(edit.path, edit.after))) for edit in edits]
            for edit, temporary in staged:
                put(temporary, edit.path)
                done.append(edit)
    except BaseException as error:
        for edit in done:
            with staged_file(edit.path, edit.before) as temporary:
                put(temporary, edit.path)
        if isinstance(error, OSError):
            raise PatchError(f"{error.filename or 'a file'}: cannot be written: {reason_of(error)}") from None
        raise


def check_writable(path: Path) -> None:
    """Refuses a place where no file can be written, as far as that shows without writing it.

    Raises:
        PatchError: no file can be written there.
    """
    folder = path.parent
    if not os.path.isdir(folder):
        raise PatchError(f"{path}: cannot be written: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise PatchError(f"{path}: cannot be written: {os.strerror(errno.EACCES)}")


def uncommitted(path: Path) -> bool:
    """git sees uncommitted changes in the file; False without git, or where the file is in no repository."""
    command = ["git", "--literal-pathspecs", "-C", str(path.parent), "status", "--porcelain", "--", path.name]
    try:
        # Without optional locks `git status` does not refresh the index: a check leaves no trace.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        result = subprocess.run(command, capture_output=True, check=False, env=environment)
    except OSError:
        return False
    return result.returncode == 0 and bool(result.stdout.strip())


def _check_content(edit: FileEdit) -> None:
    try:
        now = edit.path.read_bytes()
    except FileNotFoundError:
        now = None
    except OSError as error:
        raise PatchError(f"{edit.path}: cannot be read: {reason_of(error)}") from None
    if now != edit.before:
        is_other = "is gone" if now is None else "has changed"
        raise PatchError(f"{edit.path} {is_other} since the patch was made. Run the command again.")


def _check_committed(paths: Sequence[Path]) -> None:
    if changed := [str(path) for path in paths if uncommitted(path)]:
        have = "has" if len(changed) == 1 else "have"
        raise PatchError(f"{', '.join(changed)} {have} uncommitted changes. Commit or stash them, or use --force.")
