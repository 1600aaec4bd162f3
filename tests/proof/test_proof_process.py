"""The process of an experiment: what it says is passed on, and however it ends the other side gets an answer."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ampdbg.config.schema import Config
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.proof import processes
from ampdbg.proof.jobs import Job, Patched, Seen, Trained
from ampdbg.replay.pinned_replays import ScaleRange
from tests.observing import observing
from tests.proof.overflowing import written


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return written(tmp_path)


def run(config: Config, program: str, monkeypatch: pytest.MonkeyPatch, observer: Observer = UNOBSERVED) -> Seen:
    """A job whose process runs ``program`` and not a proof; what it is forked from has not imported torch."""
    monkeypatch.setattr(processes, "RUN", program)
    monkeypatch.setattr(processes, "SERVE", "from ampdbg.proof.processes import serve; serve()")
    with processes.fresh_processes(config.start) as run_job:
        return run_job(Job("dropped", config, Patched(), (ScaleRange(),), False), Path("steps"), observer)


def result(seen: Seen) -> str:
    """A program that writes the result."""
    return f"import sys; open(sys.argv[2], 'wb').write({pickle.dumps(seen)!r}); "


def test_stages_are_passed_on(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    program = result(Seen()) + "print('one'); print('two')"
    assert run(config, program, monkeypatch, observing(stage=stages.append)) == Seen()
    assert stages == ["one", "two"]


def test_a_result_with_nan_arrives(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(runs={"patched": Trained(losses=(float("nan"), float("inf"), 0.5))})
    assert repr(run(config, result(seen), monkeypatch)) == repr(seen)


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import os; os._exit(3)", "its process ended with exit code 3"),
        ("import sys; sys.exit('no more memory')", "its process ended with exit code 1: no more memory"),
        ("input()", "its process ended with exit code 1: EOFError: EOF when reading a line"),
        pytest.param(
            "import os; os.abort()",
            "its process ended by a signal: Aborted",
            marks=pytest.mark.skipif(os.name == "nt", reason="Windows has no signals"),
        ),
    ],
    ids=["exits", "exits with a message", "reads stdin", "crashes"],
)
def test_a_process_that_ends_without_a_result_says_how(
    program: str, failure: str, config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(config, program, monkeypatch) == Seen(failure=failure)
    assert capfd.readouterr() == ("", "")


def test_a_result_counts_although_threads_are_left(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ENDING", 0.2)
    program = result(Seen(unused=("a.py",))) + "import os, time; os.close(1); time.sleep(60)"
    assert run(config, program, monkeypatch) == Seen(unused=("a.py",))


def test_an_interrupt_ends_the_process_and_its_workers(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = (
        "import os, subprocess, sys, time; "
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(os.getpid(), worker.pid, flush=True); time.sleep(60)"
    )
    started: list[str] = []

    def interrupt(stage: str) -> None:
        started.extend(stage.split())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, program, monkeypatch, observing(stage=interrupt))
    assert not is_alive(int(started[0]))
    if os.name != "nt":
        assert not is_alive(int(started[1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows forks no process")
def test_a_forked_worker_is_not_waited_for_and_ends_with_its_process(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    program = (
        f"{result(Seen())}from ampdbg.proof.processes import own_stdout; import os, time; said = own_stdout(); "
        "pid = os.fork(); pid or (time.sleep(20), os._exit(0)); said.write(str(pid)); said.close()"
    )
    began = time.monotonic()
    assert run(config, program, monkeypatch, observing(stage=stages.append)) == Seen()
    assert time.monotonic() - began < 20
    assert not is_alive(int(stages[0]))


def test_where_no_process_can_be_started_the_reason_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert run(config, "", monkeypatch).failure.startswith("no process can be started")


def is_alive(pid: int) -> bool:
    """Whether the process still runs, after a moment to end in."""
    for _ in range(20):
        try:
            if Path("/proc").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return False
            os.kill(pid, 0)
        except OSError:  # it may end between two looks at it
            return False
        time.sleep(0.1)
    return True


KILLED = """
from pathlib import Path
from ampdbg.observer import Observer
from ampdbg.proof import processes

class Said(Observer):
    def stage(self, doing):
        print(doing, flush=True)

processes.RUN = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
processes.SERVE = "from ampdbg.proof.processes import serve; serve()"
with processes.fresh_processes(Path.cwd()) as run:
    run(None, Path("steps"), Said())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process learns that the one who waits for it is gone")
def test_a_process_ends_at_once_with_the_one_that_waits_for_it(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert not is_alive(pid)
