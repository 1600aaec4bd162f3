"""The log of ``ampdbg run``: a killed script keeps its log, and an unwritable log stops no script."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ampdbg.api import read
from ampdbg.record.file import read_record
from ampdbg.record.log import read_log
from ampdbg.record.run import Record
from tests.commands.program import start
from tests.script import scripts
from tests.siblings import slow_except

KILLED = scripts.PLAIN.replace("functional as F\n", "functional as F, itertools, os, signal\n").replace(
    "    for _ in range(steps):\n",
    "    for _ in itertools.chain(range(steps), (os.kill(os.getpid(), signal.SIGKILL) for _ in '1')):\n",
)
"""The plain script up to its last step, killed instead of ending."""


def seen(record: Record) -> str:
    """Returns the record without how the run ended, how long it took and the text of its script."""
    alike = replace(record, created="", elapsed=0.0, interrupted=False, script=None, listings=())
    return repr(alike)


@pytest.mark.parametrize("gain", slow_except(["400"], ["1", "400"]))
def test_a_log_yields_the_record_of_a_finished_script_and_of_a_killed_script(tmp_path: Path, gain: str) -> None:
    for name, text in (("killed", KILLED), ("ended", scripts.PLAIN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
    killed = start(tmp_path / "killed", "run", "--emulate", "--log=run.jsonl", "train.py", gain, "6")
    assert killed.code == -signal.SIGKILL
    start(tmp_path / "ended", "run", "--emulate", "--record=r.json", "train.py", gain, "6")
    found, whole = read(tmp_path / "killed" / "run.jsonl"), read_record(tmp_path / "ended" / "r.json")
    assert found.interrupted
    assert found.steps_run == 6
    assert seen(found).replace("killed", "ended") == seen(whole)
    assert repr(read(tmp_path / "ended" / "r.jsonl")) == repr(whole)


@pytest.mark.slow
def test_report_shows_the_log_of_a_killed_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    start(tmp_path, "run", "--emulate", "train.py", "400", "4")
    (log,) = (tmp_path / ".ampdbg").glob("*-run.jsonl")
    assert list((tmp_path / ".ampdbg").glob("*.json")) == []
    hint = f"a run has left its log: ampdbg report {log.relative_to(tmp_path)}"
    assert hint in " ".join(start(tmp_path, "report").stderr.split())
    shown = start(tmp_path, "report", str(log))
    assert shown.code == 0
    assert "forward-overflow" in shown.stdout
    assert "scores = h @ h.transpose(-1, -2)" in shown.stdout
    as_json = start(tmp_path, "report", str(log), "--format=json")
    assert json.loads(as_json.stdout)["findings"][0]["op"] == "aten.bmm.default"


def test_a_script_without_a_step_has_no_log(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    start(tmp_path, "run", "--record=r.json", "train.py")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "train.py"]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_script_and_the_log_and_the_record_keep_its_steps(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "train.py").write_text(KILLED.replace("SIGKILL", number.name))
    ended = start(tmp_path, "run", "--emulate", "--record=r.json", "train.py", "1", "4")
    assert ended.code == (-signal.SIGTERM if number is signal.SIGTERM else 130)
    for seen in (read_log(tmp_path / "r.jsonl"), read_record(tmp_path / "r.json")):
        assert seen.script is not None
        assert (seen.steps_run, seen.script.exit_code) == (4, 128 + number)


def test_a_forked_child_that_trains_writes_nothing_into_the_log(tmp_path: Path) -> None:
    parts = {
        "def main(gain, steps):": "def main(gain, steps):\n    import os",
        "    for _ in range(steps):": "    child = os.fork() == 0\n    for _ in range(3 * steps if child else steps):",
        '    print("weights"': '    if child:\n        os._exit(0)\n    os.wait()\n    print("weights"',
    }
    text = scripts.PLAIN
    for old, new in parts.items():
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    result = start(tmp_path, "run", "--emulate", "--record=r.json", "train.py", "1", "4")
    assert result.code == 0
    assert read_log(tmp_path / "r.jsonl").steps_run == 4
    assert (tmp_path / "r.jsonl").read_text().count('"step":{') == 4


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
def test_a_full_disk_gives_one_warning_and_the_script_ends_as_unwatched(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    alone = start(tmp_path, "run", "--emulate", "--no-watch", "train.py", "1", "4")
    full = start(tmp_path, "run", "--emulate", "--record=r.json", "--log=/dev/full", "train.py", "1", "4")
    assert (full.code, full.stdout) == (0, alone.stdout)
    assert (
        full.stderr.count(
            "warning: cannot write the log any more: /dev/full: No space left on device; the run continues"
        )
        == 1
    )
    assert read_record(tmp_path / "r.json").steps_run == 4


OVERWRITTEN = ", and would be overwritten; name another file"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders, and links need a privilege")
def test_log_refuses_to_overwrite_other_files_or_to_write_to_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    (tmp_path / "notes.csv").write_text("a,b\n")
    (tmp_path / "link.log").symlink_to("train.py")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    for name, told in {
        "notes.csv": f"holds no log of a run{OVERWRITTEN}",
        "train.py": f"is the file of the script{OVERWRITTEN}",
        "link.log": f"is the file of the script{OVERWRITTEN}",
        "pipe": "is a pipe; allowed: a file, or /dev/stdout",
        "circle": "is a link that leads to itself; allowed: a file, or /dev/stdout",
        "new": f"is the file of the record{OVERWRITTEN}",
    }.items():
        refused = start(tmp_path, "run", "--emulate", "--record=new", "--log", name, "train.py", "1", "2")
        assert (refused.code, refused.stdout, refused.stderr) == (2, "", f"error: --log {name} {told}\n")
    assert (tmp_path / "train.py").read_text() == scripts.PLAIN
    assert (tmp_path / "notes.csv").read_text() == "a,b\n"


@pytest.mark.slow
def test_a_log_overwrites_an_earlier_log(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    for _ in range(2):
        done = start(tmp_path, "run", "--emulate", "--record=r.json", "--log=run.log", "train.py", "1", "2")
        assert (done.code, "warning" in done.stderr) == (0, False)
        assert read_log(tmp_path / "run.log").steps_run == 2


def test_each_rank_refuses_to_overwrite_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    (tmp_path / "x-rank-1.log").write_text("mine")
    for option in ("--log", "--record", "--html"):
        arguments = ("run", "--emulate", option, "x.log", "train.py", "1", "2")
        refused = start(tmp_path, *arguments, RANK="1", WORLD_SIZE="2")
        assert (refused.code, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"error: {option} x-rank-1.log holds no ")
    assert (tmp_path / "x-rank-1.log").read_text() == "mine"


def test_a_log_with_a_default_name_overwrites_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    (tmp_path / "r.jsonl").write_text('{"mine": 1}\n')
    done = start(tmp_path, "run", "--emulate", "--record=r.json", "train.py", "1", "2")
    assert (done.code, done.stderr.count("warning: cannot write the log any more: ")) == (0, 1)
    assert "it holds no log, and would be overwritten" in " ".join(done.stderr.split())
    assert (tmp_path / "r.jsonl").read_text() == '{"mine": 1}\n'
    assert read_record(tmp_path / "r.json").steps_run == 2


@pytest.mark.slow
@pytest.mark.parametrize("record", ["r.jsonl", os.devnull])
def test_the_log_is_in_the_ampdbg_folder_if_the_record_path_gives_no_log_name(tmp_path: Path, record: str) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    for _ in range(2):
        done = start(tmp_path, "run", "--emulate", "--record", record, "train.py", "1", "2")
        assert (done.code, "warning" in done.stderr) == (0, False)
    assert len([*(tmp_path / ".ampdbg").glob("*-run*.jsonl")]) == 2


def test_report_refuses_a_damaged_log_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"format": "ampdbg.log", "version": 1}\n{"step": 3}\n')
    result = start(tmp_path, "report", "run.jsonl")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith('error: run.jsonl: a damaged log: line 2: got {"step": 3}; needed: one of')
