"""Edited files: all are written or none, and uncommitted work is never overwritten."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ampdbg.errors import PatchError
from ampdbg.files import staged_file
from ampdbg.patch.diffs import new_file_diff, unified_diff
from ampdbg.record.pins import FileDiff


@dataclass(frozen=True)
class FileEdit:
    """A file, the bytes that it must hold now (None: it must not exist) and those that it shall have."""

    path: Path
    before: bytes | None
    after: bytes


def base_folder(edits: Sequence[FileEdit], config_folder: Path) -> tuple[Path, bool]:
    """What the paths of a diff are relative to, and whether that is the root of a git repository.

    That is the repository that holds all the files; else the config's folder, or what holds that and the files.
    """
    files = [edit.path.resolve() for edit in edits]
    root = _repository(files[0].parent) if files else None
    if root is not None and all(file.is_relative_to(root) for file in files):
        return root, True
    return Path(os.path.commonpath([config_folder.resolve(), *(file.parent for file in files)])), False


def file_diff(edit: FileEdit, base: Path) -> FileDiff:
    """The edit as a diff whose path counts from ``base``."""
    path = PurePosixPath(edit.path.resolve().relative_to(base).as_posix())
    diff = new_file_diff(path, edit.after) if edit.before is None else unified_diff(path, edit.before, edit.after)
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


def write_edits(edits: Sequence[FileEdit], *, force: bool = False) -> None:
    """Writes all files, or none where one of them cannot be.

    Each file is replaced in one step and keeps its permissions; a link stays a link.

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
        _check_committed([edit.path for edit in edits if edit.before is not None])
    done: list[FileEdit] = []
    try:
        with contextlib.ExitStack() as stack:
            staged_file = [(edit, stack.enter_context(_staged(edit))) for edit in edits]
            for edit, temporary in staged_file:
                os.replace(temporary, edit.path)
                done.append(edit)
    except BaseException as error:
        for edit in done:
            _undo(edit)
        if isinstance(error, OSError):
            raise PatchError(f"{error.filename or 'a file'}: cannot be written: {error.strerror or error}") from None
        raise


def check_writable(path: Path) -> None:
    """Whether a file can be written there, as far as that can be told without writing it.

    Raises:
        PatchError: it cannot be.
    """
    folder = path.parent
    if not os.path.isdir(folder):
        raise PatchError(f"{path}: cannot be written: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise PatchError(f"{path}: cannot be written: {os.strerror(errno.EACCES)}")


def uncommitted(path: Path) -> bool:
    """Whether git sees uncommitted changes in the file; False without git, or where the file is in no repository."""
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
        raise PatchError(f"{edit.path}: cannot be read: {error.strerror or error}") from None
    if now == edit.before:
        return
    if edit.before is None:
        raise PatchError(f"{edit.path} exists already. Move it away, or name another file.")
    raise PatchError(
        f"{edit.path} {'is gone' if now is None else 'has changed'} since the patch was made. Run the command again."
    )


def _check_committed(paths: Sequence[Path]) -> None:
    if changed := [str(path) for path in paths if uncommitted(path)]:
        have = "has" if len(changed) == 1 else "have"
        raise PatchError(f"{', '.join(changed)} {have} uncommitted changes. Commit or stash them, or use --force.")


def _staged(edit: FileEdit) -> contextlib.AbstractContextManager[str]:
    edit.path.parent.mkdir(parents=True, exist_ok=True)
    return staged_file(edit.path, edit.after, keeps_mode=edit.before is not None)


def _undo(edit: FileEdit) -> None:
    if edit.before is None:
        edit.path.unlink(missing_ok=True)
        return
    back = FileEdit(edit.path, edit.after, edit.before)
    with _staged(back) as temporary:
        os.replace(temporary, edit.path)
