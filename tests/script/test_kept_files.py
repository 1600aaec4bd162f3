"""What a script writes over when it is started again for a capture is put back: its log, its checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ampdbg.script.kept_files import FOLDER, files_put_back
from tests.commands.program import environment, start
from tests.script import scripts
from tests.script.test_captures import capture_of, interrupted
from tests.script.test_run import run

BEGINS_ANEW = """
import logging, os, shutil, sqlite3, sys, torch
from pathlib import Path
logging.basicConfig(filename="train.log", filemode="w", level=logging.INFO)
logging.info("begun")
torch.save({"at": "the start"}, "last.pt")
Path("config.json").write_text("{}")
if Path("out").exists():
    shutil.rmtree("out")
if Path("old.txt").exists():
    os.remove("old.txt")
if Path("a.txt").exists():
    os.replace("a.txt", "b.txt")
with open("events.txt", "a") as events:
    events.write("one more")
Path("new.txt").write_text("new")
"""
"""Writes, removes and renames files before it trains."""

NIGHT = {
    "train.log": "a night's log\n" * 1000,
    "last.pt": "a night's weights",
    "config.json": '{"of": "the night"}',
    "out/deep/best.pt": "the best",
    "old.txt": "old",
    "a.txt": "a",
    "b.txt": "b",
    "events.txt": "events\n",
}


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in NIGHT if (folder / name).exists()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, its capture, and the files of a night."""
    folder = tmp_path_factory.mktemp("night")
    run(folder, BEGINS_ANEW + scripts.PLAIN, "400", "6")
    shutil.copy(capture_of(folder), folder / "c.safetensors")
    for name, text in NIGHT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        os.utime(folder / name, (1e9, 1e9))
    (folder / "new.txt").unlink()
    return folder


@pytest.mark.parametrize("command", ["replay", "suggest-fp32"])
def test_files_are_as_they_were_before_the_script_was_started_again(command: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(made, folder)
    result = start(folder, command, "c.safetensors")
    assert result.code == (1 if command == "replay" else 0)
    assert contents(folder) == NIGHT
    assert {(folder / name).stat().st_mtime for name in NIGHT} == {1e9}
    assert (folder / "new.txt").read_text() == "new"
    [line] = [line for line in result.stderr.splitlines() if line.startswith("put back as before: ")]
    assert line.startswith("put back as before: a.txt, b.txt, best.pt, config.json and 4 more; the script")


def test_so_they_are_when_it_is_interrupted(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(made, folder)
    interrupted("replaying step", folder, tmp_path, "replay")
    assert contents(folder) == NIGHT


def test_the_process_need_not_end_by_itself(tmp_path: Path) -> None:
    """Killed in the middle of a write: who has started it puts back what it can."""
    kept, told = tmp_path / "kept.txt", list[str]()
    kept.write_text("before")
    code = (
        "import os, signal, sys\n"
        "from ampdbg.script.kept_files import keeping_files\n"
        "with keeping_files():\n"
        "    file = open(sys.argv[1], 'w')\n"
        "    file.write('after'); file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with files_put_back(told.append):
        ended = subprocess.run([sys.executable, "-c", code, str(kept)], env=environment(), check=False)
        assert ended.returncode == -signal.SIGKILL
        assert kept.read_text() == "after"
    assert kept.read_text() == "before"
    assert told == ["put back as before: kept.txt; the script, started again, had written over it"]
    assert FOLDER not in os.environ


def test_a_process_that_is_not_told_to_keep_files_keeps_none(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("before")
    code = (
        "import sys\n"
        "from ampdbg.script.kept_files import keeping_files\n"
        "with keeping_files():\n"
        "    open(sys.argv[1], 'w').write('after')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c.txt")], check=True, env=environment())
    assert (tmp_path / "c.txt").read_text() == "after"
