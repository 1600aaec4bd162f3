"""Unified diffs of edited files, and writing them: all or none, and never over uncommitted work."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

from ampdbg.errors import PatchError, reason_of
from ampdbg.files import put, staged_file
from ampdbg.record.pins import FileDiff, RootModel

CONTEXT = 3
"""The number of unchanged lines around a change, as in git."""

NO_NEWLINE = b"\\ No newline at end of file\n"
_HEADING = re.compile(rb"^[ \t]*(class|async[ \t]+def|def)[ \t].*$")
_RANGE = re.compile(rb"@@ -(\d+)")
_ESCAPES = {
    byte: b"\\" + letter for byte, letter in zip(b'"\\\a\b\t\n\v\f\r', map(str.encode, '"\\abtnvfr'), strict=True)
}


@dataclass(frozen=True)
class FileEdit:
    """A file with its expected current bytes and its new bytes."""

    path: Path
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Patched:
    """The pins of a workload in any form of a suggestion; empty for the unchanged workload.

    Attributes:
        files: the patched bytes by absolute path; the file need not exist.
        pins_file: a key of ``files`` whose ``pin_fp32`` is called with the model, or with the models of ``roots``.
        pins: names to add to the config's pins.
        moves_constants: the files use different constants in half and in FP32.
        for_live_model: an equivalent for an existing model, where pins replace edits of the model's creation.
    """

    files: Mapping[Path, bytes] = field(default_factory=dict)
    pins_file: Path | None = None
    roots: tuple[RootModel, ...] = ()
    pins: tuple[str, ...] = ()
    moves_constants: bool = False
    for_live_model: Patched | None = None

    @property
    def changes_nothing(self) -> bool:
        """True if the files already have these bytes and there are no pins."""
        return not self.pins and all(path.exists() and path.read_bytes() == now for path, now in self.files.items())

    def line_on_disk(self, file: str, line: int) -> int:
        """Return the line of the user's file for a patched ``line``, or 0 if only the patch has it."""
        path = next((path for path in self.files if file_key(path) == file_key(file)), None)
        return counterpart(line, self.files[path], path.read_bytes()) if path is not None and path.exists() else line


def lines_title(file: str, lines: Sequence[int]) -> str:
    """Name lines of a file in words."""
    name = Path(file).name
    if len(lines) == 1:
        return f"line {lines[0]} of {name}"
    between = "and" if len(lines) == 2 and lines[1] > lines[0] + 1 else "to"
    return f"lines {lines[0]} {between} {lines[-1]} of {name}"


def file_key(path: str | Path) -> str:
    """Return a key that is equal for all spellings of a path."""
    return os.path.normcase(os.path.realpath(path))


def bytes_by_path(edits: Iterable[FileEdit]) -> dict[Path, bytes]:
    """Return the new bytes of each file."""
    return {edit.path: edit.after for edit in edits}


def counterpart(line: int, here: bytes, there: bytes) -> int:
    """Return the line of ``there`` that matches line ``line`` of ``here``, ignoring indentation, or 0."""
    return next((at + line - start for start, at, size in _common(here, there) if start < line <= start + size), 0)


@lru_cache(maxsize=8)
def _common(here: bytes, there: bytes) -> Sequence[tuple[int, int, int]]:
    one, other = ([line.strip() for line in source.split(b"\n")] for source in (here, there))
    return difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()


def base_folder(edits: Sequence[FileEdit], config_folder: Path) -> tuple[Path, bool]:
    """Return the folder that a diff's paths are relative to, and True if it is a git repository's root.

    This is the repository around the config and all files, even if the files are in a nested one. Without a repository,
    it is the common parent of the config's folder and all files.
    """
    files = [edit.path.resolve().parent for edit in edits]
    around = Path(os.path.commonpath([config_folder.resolve(), *files]))
    root = os.fsdecode(_git(around, "rev-parse", "--show-toplevel")).removesuffix("\n").removesuffix("\r")
    return (Path(root).resolve(), True) if root else (around, False)


def file_diff(edit: FileEdit, base: Path) -> FileDiff:
    """Return the edit as a diff whose path is relative to ``base``."""
    path = PurePosixPath(edit.path.resolve().relative_to(base).as_posix())
    diff = unified_diff(path, edit.before, edit.after)
    try:
        return FileDiff(str(path), "utf-8", diff.decode("utf-8"))
    except UnicodeDecodeError:
        return FileDiff(str(path), "latin-1", diff.decode("latin-1"))


def _git(folder: Path, *arguments: str) -> bytes:
    """Return the output of a git command, or nothing without git or outside of a repository."""
    # Without optional locks, `git status` does not refresh the index, so the check changes nothing.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "--literal-pathspecs", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
    except OSError:
        return b""
    return done.stdout if done.returncode == 0 else b""


def unified_diff(path: PurePosixPath, before: bytes, after: bytes) -> bytes:
    """Return the change of one file for ``git apply`` and ``patch -p1``, or empty bytes if nothing changed.

    The lines are the file's own bytes in any encoding and with any line endings. Write the diff to a binary stream.
    ``path`` is relative to the folder where the diff is applied.
    """
    if before == after:
        return b""
    old, new = _quoted("a/", path), _quoted("b/", path)
    # A tab ends a name with spaces, which patch would otherwise cut at the first space.
    end = b"\t\n" if " " in str(path) else b"\n"
    header = b"diff --git %b %b\n--- %b%b+++ %b%b" % (old, new, old, end, new, end)
    return header + b"".join(_hunks(_lines(before), _lines(after)))


def _quoted(prefix: str, path: PurePosixPath) -> bytes:
    """Return a path as git writes it: C-quoted with octal escapes unless it is printable ASCII."""
    name = (prefix + path.as_posix()).encode("utf-8", "surrogateescape")
    escaped = b"".join(_ESCAPES.get(byte, bytes([byte]) if 32 <= byte < 127 else b"\\%03o" % byte) for byte in name)
    return name if escaped == name else b'"' + escaped + b'"'


def _lines(content: bytes) -> list[bytes]:
    """Split at line feeds only. A form feed or a lone carriage return is part of a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)


def _hunks(before: Sequence[bytes], after: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the hunks, each headed by the class or function above it."""
    # Skip difflib's two header lines; the caller writes git's longer header.
    for line in islice(difflib.diff_bytes(difflib.unified_diff, before, after, n=CONTEXT), 2, None):
        if (start := _RANGE.match(line)) is not None:
            above = reversed(before[: max(int(start[1]) - 1, 0)])
            heading = next((other for other in above if _HEADING.match(other)), b"").strip()
            yield b" ".join(part for part in (line.strip(), heading) if part) + b"\n"
        else:
            yield line if line.endswith(b"\n") else line + b"\n" + NO_NEWLINE


def write_edits(edits: Sequence[FileEdit], *, force: bool = False) -> None:
    """Write all files, or none if one of them cannot be written.

    Each file is replaced atomically and keeps its permissions and links. ``force`` also overwrites uncommitted changes.

    Raises:
        PatchError: a file differs from the edit's expected bytes, has uncommitted changes, or cannot be written.
    """
    edits = [FileEdit(edit.path.resolve(), edit.before, edit.after) for edit in edits]
    for edit in edits:
        _check_content(edit)
    if changed := [str(edit.path) for edit in edits if not force and uncommitted(edit.path)]:
        have = "has" if len(changed) == 1 else "have"
        raise PatchError(f"{', '.join(changed)} {have} uncommitted changes. Commit or stash them, or use --force.")
    try:
        # If one file cannot be restored, the stack still restores the others.
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as restoring:
            old = [stack.enter_context(staged_file(edit.path, edit.before)) for edit in edits]
            new = [stack.enter_context(staged_file(edit.path, edit.after)) for edit in edits]
            for edit, before, after in zip(edits, old, new, strict=True):
                put(after, edit.path)
                restoring.callback(put, before, edit.path)
            restoring.pop_all()
    except OSError as error:
        raise PatchError(f"{error.filename or 'a file'}: cannot be written: {reason_of(error)}") from None


def check_writable(path: Path) -> None:
    """Check, without writing, that a file can be written at this path.

    Raises:
        PatchError: no file can be written there.
    """
    folder = path.parent
    if not os.path.isdir(folder):
        raise PatchError(f"{path}: cannot be written: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise PatchError(f"{path}: cannot be written: {os.strerror(errno.EACCES)}")


def uncommitted(path: Path) -> bool:
    """True if git reports uncommitted changes; False without git or outside of a repository."""
    return bool(_git(path.parent, "status", "--porcelain", "--", path.name).strip())


def _check_content(edit: FileEdit) -> None:
    try:
        what = "" if edit.path.read_bytes() == edit.before else "has changed"
    except FileNotFoundError:
        what = "is gone"
    except OSError as error:
        raise PatchError(f"{edit.path}: cannot be read: {reason_of(error)}") from None
    if what:
        raise PatchError(f"{edit.path} {what} since the patch was made. Run the command again.")
