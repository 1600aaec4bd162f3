"""Tests that files are replaced as a whole, and that links and pipes stay links and pipes."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from ampdbg import files
from ampdbg.files import read_file, replace_file, replace_name, staged_file, temporary_folder

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders, and links need a privilege")


def test_a_new_file_has_default_permissions_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    replace_file(tmp_path / "new" / "record.json", b"all of it")
    (tmp_path / "touched").touch()
    assert [item.name for item in (tmp_path / "new").iterdir()] == ["record.json"]
    assert (tmp_path / "new" / "record.json").read_bytes() == b"all of it"
    assert (tmp_path / "new" / "record.json").stat().st_mode == (tmp_path / "touched").stat().st_mode


@posix
def test_a_replaced_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


@posix
def test_a_cycle_of_links_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links") as raised:
        replace_file(tmp_path / "one", b"new")
    assert raised.value.filename == str(tmp_path / "one")
    assert {item.name: item.is_symlink() for item in tmp_path.iterdir()} == {"one": True, "two": True}


@posix
@pytest.mark.parametrize("link", ["link", "dangling", "hard", "pipe"])
def test_replace_name_replaces_the_name_and_leaves_the_target_of_a_link(tmp_path: Path, link: str) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o750)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("none")
    os.link(tmp_path / "file", tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    replace_name(tmp_path / link, b"new")
    assert ((tmp_path / link).is_symlink(), (tmp_path / link).read_bytes()) == (False, b"new")
    assert ((tmp_path / "file").read_text(), (tmp_path / "none").exists()) == ("old", False)
    if link != "hard":
        (tmp_path / "touched").touch()
        assert (tmp_path / link).stat().st_mode == (tmp_path / "touched").stat().st_mode


@posix
def test_a_replaced_file_keeps_its_permissions_and_its_hard_links(tmp_path: Path) -> None:
    script, alone = tmp_path / "train.py", tmp_path / "alone.py"
    for file in (script, alone):
        file.write_text("old")
        file.chmod(0o750)
    os.link(script, tmp_path / "other_name.py")
    replace_file(script, b"new")
    replace_file(alone, b"new")
    assert (tmp_path / "other_name.py").read_bytes() == b"new"
    assert script.samefile(tmp_path / "other_name.py")
    assert {stat.S_IMODE(file.stat().st_mode) for file in (script, alone)} == {0o750}


@posix
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    replace_file(pipe, b"through it")
    reader.join(10)
    assert (read, pipe.is_fifo()) == ([b"through it"], True)


@posix
def test_a_pipe_is_read_to_its_end_and_refused_without_a_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a pipe that nobody writes to"):
        read_file(pipe, 100)
    other = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = pipe.open("wb")

    def write() -> None:
        with writer:
            writer.write(b"through it")

    late = threading.Timer(0.1, write)
    late.start()
    assert read_file(pipe, 100) == b"through it"
    late.join()
    os.close(other)


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe that is stdout has such a path on Linux")
def test_a_piped_stdout_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout is; root could replace /dev/stdout itself
    write = "from pathlib import Path; from ampdbg.files import replace_file; replace_file(Path('stdout'), b'x')"
    done = subprocess.run([sys.executable, "-c", write], check=False, capture_output=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (b"x", b"")


HOLDS = """
import os, signal
from pathlib import Path
from ampdbg.files import staged_file, temporary_folder
with temporary_folder() as folder, staged_file(Path("record.json"), b"half") as file:
    print(folder, file.absolute(), sep="\\n", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_the_next_process_removes_files_of_a_killed_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "ABANDONED", -1.0)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    here = tmp_path / "here"
    here.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", HOLDS], env=environment, cwd=here, capture_output=True, text=True, check=False
    )
    left, file = map(Path, done.stdout.splitlines())
    assert left.parent == tmp_path
    assert left.exists()
    assert file.read_bytes() == b"half"
    (tmp_path / "ampdbg-of-mine").mkdir()
    (here / ".record.json.1234abcd.tmp").touch()
    with temporary_folder() as first, staged_file(here / "a", b"") as held:
        assert not left.exists()
        assert not file.exists()
        with temporary_folder() as second, staged_file(here / "b", b"") as other:  # files in use stay
            assert all(path.exists() for path in (first, second, held, other))
    assert {item.name for item in tmp_path.iterdir()} == {"ampdbg-of-mine", "here"}
    assert [item.name for item in here.iterdir()] == [".record.json.1234abcd.tmp"]


def test_an_interrupt_while_a_temporary_folder_is_made_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def interrupted(path: Path, mode: int) -> None:
        make(path, mode)
        assert [*tmp_path.iterdir()] == [path]
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), temporary_folder():
        pass
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_an_error_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, mode: str) -> BinaryIO:
        return open("/dev/full", "wb")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left") as raised:
        replace_file(tmp_path / "train.py", b"new")
    assert raised.value.filename == str(tmp_path / "train.py")


def test_a_file_with_the_longest_name_is_written(tmp_path: Path) -> None:
    replace_file(tmp_path / ("n" * 255), b"it")
    assert [len(item.name) for item in tmp_path.iterdir()] == [255]
