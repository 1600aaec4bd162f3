"""Edited files: all or none are written, permissions are kept, and uncommitted work is overwritten only if forced."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ampdbg.errors import PatchError
from ampdbg.patch.file_edits import FileEdit, write_edits

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with `a.py` and `b.py`, committed."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_bytes(name.encode())
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-q", "-m", "first")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def both(folder: Path) -> list[FileEdit]:
    return [FileEdit(folder / name, name.encode(), name.encode() + b" edited") for name in ("a.py", "b.py")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


OLD = {"a.py": b"a.py", "b.py": b"b.py"}
NEW = {"a.py": b"a.py edited", "b.py": b"b.py edited"}


@needs_git
@pytest.mark.parametrize("stage", [False, True], ids=["changed", "staged"])
def test_a_file_with_uncommitted_changes_is_refused_by_name_unless_forced(repository: Path, stage: bool) -> None:
    (repository / "b.py").write_bytes(b"mine")
    if stage:
        git(repository, "add", "b.py")
    edits = [both(repository)[0], FileEdit(repository / "b.py", b"mine", b"yours")]
    with pytest.raises(PatchError, match=r"b\.py has uncommitted changes\. .* --force") as caught:
        write_edits(edits)
    assert "a.py" not in str(caught.value)
    assert contents(repository) == {**OLD, "b.py": b"mine"}
    write_edits(edits, force=True)
    assert contents(repository) == {**NEW, "b.py": b"yours"}


@needs_git
def test_an_untracked_file_is_refused_and_does_not_block_other_files(repository: Path) -> None:
    (repository / "c.py").write_bytes(b"untracked")
    with pytest.raises(PatchError, match=r"c\.py"):
        write_edits([FileEdit(repository / "c.py", b"untracked", b"edited")])
    write_edits(both(repository))
    assert contents(repository) == {**NEW, "c.py": b"untracked"}


@needs_git
def test_committed_files_are_written_and_the_git_index_is_unchanged(repository: Path) -> None:
    index = repository / ".git" / "index"
    os.utime(repository / "a.py", (1, 1))
    before = index.read_bytes()
    write_edits(both(repository))
    assert index.read_bytes() == before
    assert contents(repository) == NEW


@pytest.mark.parametrize("has_git", [True, False])
def test_files_outside_a_repository_are_written_with_or_without_git(
    has_git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.py").write_bytes(b"a")
    write_edits([FileEdit(tmp_path / "a.py", b"a", b"b")])
    assert (tmp_path / "a.py").read_bytes() == b"b"


@pytest.mark.parametrize(("now", "message"), [(b"else", "has changed"), (None, "is gone")])
def test_a_changed_or_missing_file_is_refused_even_if_forced(tmp_path: Path, now: bytes | None, message: str) -> None:
    file = tmp_path / "a.py"
    if now is not None:
        file.write_bytes(now)
    with pytest.raises(PatchError, match=message):
        write_edits([FileEdit(file, b"a", b"b")], force=True)
    assert (file.read_bytes() if file.exists() else None) == now


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_no_file_is_changed_if_a_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    for name in OLD:
        (tmp_path / name).write_bytes(name.encode())
    replace = os.replace

    def failing(source: str, target: Path) -> None:
        if Path(target).name == "b.py":
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PatchError if isinstance(error, OSError) else KeyboardInterrupt):
        write_edits(both(tmp_path))
    assert contents(tmp_path) == OLD


def test_a_file_that_cannot_be_restored_does_not_keep_the_others_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = [FileEdit(tmp_path / name, b"old", b"new") for name in ("a.py", "b.py", "c.py")]
    for edit in edits:
        edit.path.write_bytes(edit.before)
    replace, written = os.replace, list[str]()

    def failing(source: str, target: Path) -> None:
        written.append(Path(target).name)
        if written[-1] == "c.py" or (written[-1] == "b.py" and written.count("b.py") > 1):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PatchError):
        write_edits(edits)
    assert contents(tmp_path) == {"a.py": b"old", "b.py": b"new", "c.py": b"old"}


@pytest.mark.skipif(sys.platform == "win32", reason="permissions and links of POSIX")
def test_writing_keeps_permissions_symlinks_and_hard_links(tmp_path: Path) -> None:
    file, link = tmp_path / "a.py", tmp_path / "link.py"
    file.write_bytes(b"a")
    file.chmod(0o750)
    link.symlink_to(file)
    os.link(file, tmp_path / "hard.py")
    write_edits([FileEdit(link, b"a", b"b")])
    assert link.is_symlink()
    assert file.read_bytes() == (tmp_path / "hard.py").read_bytes() == b"b"
    assert stat.S_IMODE(file.stat().st_mode) == 0o750
