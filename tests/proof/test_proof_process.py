"""The process of an experiment: its stages are passed on, and its parent gets an answer however it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.proof import processes
from ampdbg.proof.jobs import FreshProcesses, JobResult
from ampdbg.proof.processes import Task
from tests.commands.program import environment
from tests.observing import observing
from tests.proof import tasks

LIGHT = "from ampdbg.proof.processes import main; main()"
NOTHING = tasks.Light()


def run(
    task: Task, folder: Path, monkeypatch: pytest.MonkeyPatch, seen: Any = NOTHING, observer: Observer = UNOBSERVED
) -> Any:
    """The result of a process that runs the task and no proof; it does not import torch."""
    monkeypatch.setattr(processes, "RUN", LIGHT)
    with FreshProcesses(folder) as start:
        return start(task, seen)(observer)


def test_stages_are_passed_on_to_the_observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    assert run(tasks.reports_two_stages, tmp_path, monkeypatch, observer=observing(stage=stages.append)) == NOTHING
    assert stages == ["one", "two"]


def test_a_result_with_nan_and_inf_arrives_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tasks.Light(losses=(float("nan"), float("inf"), 0.5))
    assert repr(run(tasks.reports_two_stages, tmp_path, monkeypatch, seen)) == repr(seen)


@pytest.mark.parametrize(
    ("task", "failure"),
    [
        (tasks.exits, "its process ended with exit code 3"),
        (tasks.exits_with_a_message, "its process ended with exit code 1: no more memory"),
        (tasks.reads_stdin, "its process ended with exit code 1: EOFError: EOF when reading a line"),
        pytest.param(
            tasks.crashes,
            "its process ended by a signal: Aborted",
            marks=pytest.mark.skipif(os.name == "nt", reason="Windows has no signals"),
        ),
    ],
    ids=["exits", "exits with a message", "reads stdin", "crashes"],
)
def test_a_process_without_a_result_reports_how_it_ended(
    task: Task, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(task, tmp_path, monkeypatch) == JobResult(failure=failure)
    assert capfd.readouterr() == ("", "")


def test_a_result_counts_even_if_the_process_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ENDING", 0.2)
    assert run(tasks.does_not_end, tmp_path, monkeypatch, tasks.Light("a")) == tasks.Light("a")


def test_an_interrupt_ends_the_process_and_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def interrupt(stage: str) -> None:
        started.extend(stage.split())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tasks.starts_a_worker, tmp_path, monkeypatch, observer=observing(stage=interrupt))
    assert not is_alive(int(started[0]))
    if os.name != "nt":
        assert not is_alive(int(started[1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows forks no process")
def test_a_forked_worker_is_not_waited_for_and_ends_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    began = time.monotonic()
    assert run(tasks.forks_a_worker, tmp_path, monkeypatch, observer=observing(stage=stages.append)) == NOTHING
    assert time.monotonic() - began < 20
    assert not is_alive(int(stages[0]))


def test_a_warm_process_is_used_and_is_ended_if_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RUN", LIGHT)
    began: list[Any] = []
    popen = subprocess.Popen

    def begin(*args: Any, **how: Any) -> Any:
        began.append(popen(*args, **how))
        return began[-1]

    monkeypatch.setattr(subprocess, "Popen", begin)
    with FreshProcesses(tmp_path) as start:
        start.warm()
        assert start(tasks.reports_two_stages, cast(Any, NOTHING))(UNOBSERVED) == cast(Any, NOTHING)
        assert len(began) == 1
        start.warm()
    assert len(began) == 2
    assert not is_alive(began[1].pid)


def test_the_failure_says_that_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert run(tasks.exits, tmp_path, monkeypatch).failure.startswith("no process can be started")


def is_alive(pid: int) -> bool:
    """Whether the process still runs after a short wait for its end."""
    for _ in range(20):
        try:
            if Path("/proc").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return False
            os.kill(pid, 0)
        except OSError:  # it may end between two checks
            return False
        time.sleep(0.1)
    return True


KILLED = """
from ampdbg.observer import Observer
from ampdbg.proof import processes
from tests.proof import tasks

class Said(Observer):
    def stage(self, doing):
        print(doing.split()[0], flush=True)

processes.RUN = "from ampdbg.proof.processes import main; main()"
with processes.fresh_process() as process:  # FreshProcesses, which starts it thus, would import torch here
    process.begin(tasks.starts_a_worker, None)
    process.pass_on(Said())
"""


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert not is_alive(pid)
