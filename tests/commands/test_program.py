"""The real program on a tiny training run: clean stdout, signals, closed pipes and user errors."""

import contextlib
import functools
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ampdbg
from ampdbg.files import TEMPORARY
from ampdbg.record.file import from_json, read_record
from ampdbg.record.run import Step
from tests.commands.program import command, environment, start, start_fresh
from tests.observing import observing

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and pipes")

WORKLOAD = '''
import atexit, ctypes, itertools, os, subprocess, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

print("printed at import")


class Net(nn.Module):
    """Overflows in float16 when gain is large: finite in float32."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.first, self.second, self.gain = nn.Linear(8, 32), nn.Linear(32, 4), gain

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) * self.gain)


def batches(delay=0.0, loud=False, fail_at=-1):
    generator = torch.Generator().manual_seed(0)
    for number in itertools.count():
        time.sleep(delay)
        if number == fail_at:
            raise KeyError("no such column")
        if loud:
            atexit.register(print, "from atexit")
            print("from print")
            os.write(1, b"from a descriptor\\n")
            subprocess.run([sys.executable, "-c", "print('from a child')"])
            if os.name != "nt":
                ctypes.CDLL(None).puts(b"from C")
        yield torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


class Loud(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        print("from a worker")
        return torch.ones(8) * index, torch.tensor(index % 4)


def loader():
    return DataLoader(Loud(), batch_size=4, num_workers=1)
'''

CONFIG = """
model: {target: "workload.py:Net"}
data: {target: "workload.py:batches", args: {}}
loss: {target: "torch.nn.functional:cross_entropy"}
train: {steps: 3, device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``c.yaml`` and its workload."""
    (tmp_path / "workload.py").write_text(WORKLOAD, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def test_a_healthy_scan_exits_with_0_and_report_repeats_its_first_lines(folder: Path) -> None:
    result = start(folder, "scan", "c.yaml")
    assert result.code == 0, result.stderr
    assert result.stdout.startswith("✓ Healthy")
    report = start(folder, "report")
    assert report.stdout.splitlines()[:4] == result.stdout.splitlines()[:4]


@pytest.mark.slow
def test_json_prints_only_the_record_on_stdout_even_if_user_code_prints(folder: Path) -> None:
    loud = ("--set", "data.args.loud=true", "--set", "model.args.gain=1e5")
    result = start_fresh(folder, "scan", "c.yaml", "--json", *loud)
    assert result.code == 1, result.stderr
    record = from_json(result.stdout)
    assert (len(record.steps), record.findings[0].phase) == (3, "forward")
    for source in ("print", "a descriptor", "a child", "atexit"):
        assert result.stderr.count(f"from {source}\n") == 3
    assert result.stderr.count("from C\n") == (0 if os.name == "nt" else 3)
    assert "printed at import\n" in result.stderr


def test_output_of_dataloader_workers_goes_to_stderr(folder: Path) -> None:
    result = start(folder, "scan", "c.yaml", "--json", "--set", "data.target=workload.py:loader")
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout)["verdict"] == "healthy"
    assert "from a worker\n" in result.stderr


OVERFLOWS = ("--set", "model.args.gain=1e5")
SLOWLY = ("--steps", "1000", "--set", "data.args.delay=0.01")
INTERRUPTED = {
    "in a healthy run": (("scan", *SLOWLY), "step 1/", "! Interrupted after "),
    "in the first replay": (("scan", *SLOWLY, *OVERFLOWS), "replaying step 0", "! Interrupted after "),
    "in the first replay before a search": (
        ("bisect", *SLOWLY, *OVERFLOWS),
        "replaying step 0",
        "! Interrupted after ",
    ),
    "in a search": (("bisect", *OVERFLOWS), "trial 1:", "! Interrupted"),
    "in a proof": (("suggest-fp32", *OVERFLOWS), "the failing step with the patch", "! Interrupted during the proof."),
}


@pytest.mark.slow
@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("given", "at", "says"), INTERRUPTED.values(), ids=INTERRUPTED)
def test_an_interrupted_run_exits_with_130_and_leaves_a_record_and_a_report(
    given: tuple[str, ...],
    at: str,
    says: str,
    number: signal.Signals,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    verb, *options = given
    process = subprocess.Popen(
        command(verb, "c.yaml", *options),
        cwd=folder,
        env=environment(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stderr is not None
    read = iter(process.stderr.readline, "")
    before = [*itertools.takewhile(lambda line: not line.startswith(at), read)]
    assert process.poll() is None, before
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "nothing was recorded" not in stderr
    record = read_record(folder / ".ampdbg" / "latest.json")
    assert (record.interrupted, record.command) == (True, verb)
    if SLOWLY[1] in given:
        assert 1 <= len(record.steps) < 1000
        assert stdout.startswith(f"{says}{len(record.steps)} of 1,000 steps")
    else:
        assert record.trials
        assert says in stdout + stderr
    assert [*temporary.glob(f"{TEMPORARY}*")] == []


@contextlib.contextmanager
def closed_pipe() -> Iterator[int]:
    """The write end of a pipe whose read end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.slow
@posix
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stdout_or_stderr_pipe_does_not_fail_the_scan(stream: str, folder: Path) -> None:
    with closed_pipe() as writing:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writing}
        ran = subprocess.run(
            command("scan", "c.yaml"), cwd=folder, env=environment(), timeout=60, check=False, **streams
        )
    assert ran.returncode == 0
    assert read_record(folder / ".ampdbg" / "latest.json").verdict == "healthy"
    if stream == "stdout":
        assert b"Broken" not in ran.stderr
        assert b"Traceback" not in ran.stderr
    else:
        assert ran.stdout.startswith("✓ Healthy".encode())


def test_a_user_error_during_a_run_keeps_the_steps_before_the_error(folder: Path) -> None:
    result = start(folder, "scan", "c.yaml", "--quiet", "--set", "data.args.fail_at=2")
    assert (result.code, result.stdout) == (2, "")
    error, hint = result.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert hint.startswith("the 2 steps before it: ampdbg report .ampdbg")
    record = read_record(folder / ".ampdbg" / "latest.json")
    assert [step.step for step in record.steps] == [0, 1]
    assert (record.verdict, record.error) == ("inconclusive", error.removeprefix("error: "))
    report = start(folder, *hint.partition(": ampdbg ")[2].split()).stdout
    assert report.startswith("! An error stopped the run after 2 of 3 steps.")
    assert record.error in " ".join(report.split())


def test_an_overflow_before_a_user_error_is_diagnosed_in_the_requested_record(folder: Path) -> None:
    overflows = ("--set", "model.args.gain=1e5", "--set", "data.args.fail_at=2", "--record", "here.json")
    result = start(folder, "scan", "c.yaml", "--quiet", *overflows)
    assert result.code == 2
    assert result.stderr.splitlines()[-1] == "the 2 steps before it: ampdbg report here.json"
    record = read_record(folder / "here.json")
    assert (record.verdict, record.findings[0].code) == ("precision", "forward-overflow")
    assert not (folder / ".ampdbg").exists()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_record_bytes_except_for_times(folder: Path) -> None:
    def scanned(*settings: str) -> str:
        result = start(folder, "scan", "c.yaml", "--json", "--quiet", "--set", "model.args.gain=1e5", *settings)
        assert result.code == 1, result.stderr
        lines = result.stdout.splitlines(keepends=True)
        timeless = [line for line in lines if not line.startswith((' "created": ', ' "elapsed": '))]
        assert len(timeless) == len(lines) - 2
        return "".join(timeless)

    first = scanned()
    assert '"why": "loss"' in first
    assert first == scanned()
    assert first != scanned("--seed", "1")


UNWRITABLE = "error: stdout: cannot be written: "


@pytest.mark.slow
@posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize(
    ("closed", "code"), [(">&-", 2), ("2>&-", 0), (">&- 2>&-", 2), ("2>/dev/full", 0), (">/dev/full", 2)]
)
def test_a_closed_or_full_output_stream_does_not_lose_the_record(closed: str, code: int, folder: Path) -> None:
    (folder / "workload.py").write_text(WORKLOAD.replace('print("printed at import")', ""), encoding="utf-8")
    line = f"{shlex.join(command('scan', 'c.yaml'))} {closed}"
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environment(), capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == code, done.stderr
    assert read_record(folder / ".ampdbg" / "latest.json").verdict == "healthy"
    said = {">&-": f"{UNWRITABLE}it is closed", ">/dev/full": f"{UNWRITABLE}No space left on device"}
    if closed in said:
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1] == said[closed]
    if code == 0:
        assert done.stdout.startswith("✓ Healthy")


FULL = f"{UNWRITABLE}No space left on device\n"
LIKE_HELP = functools.partial(pytest.param, "--version", marks=pytest.mark.slow)
"""Typer prints the version where it prints the help."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--help", FULL), LIKE_HELP(FULL), ("explain", FULL), ("scan --nope 2>/dev/full", "")],
)
def test_a_command_without_a_run_exits_with_2_if_stdout_is_full(arguments: str, message: str, tmp_path: Path) -> None:
    line = f"{shlex.join(command())} {arguments} >/dev/full"
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, message)


@posix
@pytest.mark.parametrize(("arguments", "code"), [("--help", 0), LIKE_HELP(0), ("explain", 0), ("scan --nope", 2)])
def test_a_closed_pipe_keeps_the_exit_code_and_prints_no_error(arguments: str, code: int, tmp_path: Path) -> None:
    with closed_pipe() as writing:
        out, error = (subprocess.PIPE, writing) if code else (writing, subprocess.PIPE)
        given = command(*arguments.split())
        done = subprocess.run(given, cwd=tmp_path, env=environment(), stdout=out, stderr=error, check=False)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (code, b"", b"")


INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
sys.argv = ["ampdbg", "--help"]
from ampdbg.__main__ import main
main()
"""


@posix
def test_ctrl_c_during_the_imports_exits_with_130_and_no_traceback(tmp_path: Path) -> None:
    program = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


WANDERING = """
import os, torch
os.chdir("elsewhere")
build_model = lambda: torch.nn.Linear(4, 2)
build_data = lambda: [(torch.ones(2, 4), torch.zeros(2, dtype=int))]
loss = torch.nn.functional.cross_entropy
"""


@pytest.mark.parametrize("given", ["scan c.yaml", "bisect --module m.py --steps 1"])
def test_user_code_that_changes_the_working_folder_does_not_move_the_record(given: str, folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    init = "        super().__init__()\n"
    wandering = WORKLOAD.replace(init, f'{init}        os.chdir("elsewhere")\n')
    (folder / "workload.py").write_text(wandering, encoding="utf-8")
    (folder / "m.py").write_text(WANDERING, encoding="utf-8")
    result = start(folder, *given.split(), "--quiet")
    assert result.code == 0, result.stderr
    assert (folder / ".ampdbg" / "latest.json").exists()
    assert list((folder / "elsewhere").iterdir()) == []


@pytest.mark.slow
def test_scans_in_two_threads_keep_workloads_apart_and_leave_no_module(folder: Path) -> None:
    (folder / "other").mkdir()
    for name in ("workload.py", "c.yaml"):
        (folder / "other" / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(ampdbg.scan, folder / "c.yaml", overrides=["model.args.gain=1e5"])
        healthy = pool.submit(ampdbg.scan, folder / "other" / "c.yaml")
        assert (failing.result().verdict, healthy.result().verdict) == ("precision", "healthy")
    assert "workload" not in sys.modules


def test_scan_from_python_observes_each_step_and_writes_no_file(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Step] = []
    record = ampdbg.scan(
        folder / "c.yaml", steps=2, seed=5, overrides=["model.args.gain=1e5"], observer=observing(step=seen.append)
    )
    assert (record.verdict, record.planned_steps, record.config["train"]["seed"]) == ("precision", 2, 5)
    # As text: a NaN is not equal to itself; since Python 3.13, neither is a dataclass that holds one.
    assert list(map(repr, seen)) == list(map(repr, record.steps))
    assert not (folder / ".ampdbg").exists()
    assert "printed at import" in capfd.readouterr().out


@pytest.mark.slow
def test_scan_from_python_does_not_import_typer_and_takes_a_record_path(folder: Path) -> None:
    program = (
        "import sys, ampdbg; record = ampdbg.scan('c.yaml', steps=2); ampdbg.write_record(record, 'r.json'); "
        "assert 'typer' not in sys.modules; print(ampdbg.scan('r.json').planned_steps)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "2", done.stderr
    with pytest.raises(TypeError, match="stepz"):
        ampdbg.scan(folder / "c.yaml", stepz=2)  # type: ignore[call-arg]


TORCH = """
import os, signal
try:
    os.kill(os.getpid(), signal.{signal})
    for _ in range(1000):
        pass
except KeyboardInterrupt:
    print("raised in the import")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_an_interrupt_during_the_torch_import_is_not_raised_inside_the_import(tmp_path: Path, number: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH.format(signal=number))
    (tmp_path / "c.yaml").write_text("model: {target: w.py:Net}\ndata: {target: w.py:batches}\n")
    (tmp_path / "w.py").write_text("class Net: ...\ndef batches(): ...\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    result = start_fresh(tmp_path, "scan", "c.yaml", "--quiet", PYTHONPATH=path)
    assert (result.code, result.stdout, result.stderr) == (130, "", "interrupted: nothing was recorded\n")
