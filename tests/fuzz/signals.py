"""Runs that a signal interrupts or kills at any moment."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from ampdbg import files
from tests.commands.program import Result, command, environment
from tests.fuzz.outcome import PACKAGE, Attack, faults_of_records, faults_of_text, files_left

WORKLOAD = """\
import time
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.body, self.head, self.gain = nn.Linear(4, 4), nn.Linear(4, 2), gain

    def forward(self, x):
        time.sleep(0.005)
        return self.head(self.body(x) * self.gain).float().square().mean()


def batches():
    return [torch.ones(8, 4)]
"""
CONFIG = """\
model: {{target: w.py:Net, args: {{gain: {gain}}}}}
data: {{target: w.py:batches}}
train: {{steps: {steps}, device: cpu}}
"""

RUNS = st.sampled_from([("scan", 400, "1.0"), ("ranges", 400, "1.0"), ("bisect", 3, "1e6"), ("suggest-fp32", 3, "1e6")])
"""Verb, steps and gain: runs of some seconds."""

MOMENTS = st.floats(0, 0.1) | st.floats(0, 2) | st.floats(1, 6) | st.floats(3, 15)
"""Seconds after the start."""

NUMBERS = st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])

ENDING = 10.0
"""Seconds in which all processes that a program started must end after it."""


def faults(folder: Path, run: tuple[str, int, str], moment: float, number: signal.Signals) -> list[str]:
    """The faults of a run that gets a signal in an empty folder."""
    verb, steps, gain = run
    work, temporary = folder / "work", folder / "tmp"
    for name in (work, temporary):
        name.mkdir(exist_ok=True)
    (work / "w.py").write_text(WORKLOAD, encoding="utf-8")
    (work / "c.yaml").write_text(CONFIG.format(steps=steps, gain=gain), encoding="utf-8")
    attack = Attack(work, {"w.py", "c.yaml"})
    result = _interrupted(work, temporary, verb, moment, number)
    if result.stderr.endswith("KeyboardInterrupt\n") and PACKAGE not in result.stderr:
        return []  # Python itself was still starting
    found = [fault for fault in faults_of_text(result) if result.code >= 0 or fault == "frames of ampdbg"]
    # If an interrupt arrives in an exec, as in an import of torch, Python ends by SIGINT, which shells show as 130.
    if result.code not in (0, 1, 130, -signal.SIGINT, -number):
        found.append(f"the exit code {result.code}")
    found += [fault for fault in files_left(attack) if not (number == signal.SIGKILL and files.TEMPORARY in fault)]
    # An interrupt may arrive after the record was written. The message then names the record.
    if result.code != -number and not (result.code == 130 and "the findings so far: ampdbg report " in result.stderr):
        found += faults_of_records(result, attack.records)
    if result.code == 130 and verb == "scan" and "Interrupted after" in result.stdout and not attack.records:
        found.append("a lost record")
    with mock.patch.object(tempfile, "tempdir", str(temporary)), mock.patch.object(files, "ABANDONED", -1.0):
        if number == signal.SIGKILL:
            with files.temporary_folder():
                pass
    found += [f"{path.name} was left" for path in temporary.glob(f"{files.TEMPORARY}*")]
    return [f"{fault}: {result}" for fault in found]


def _interrupted(folder: Path, temporary: Path, verb: str, moment: float, number: signal.Signals) -> Result:
    mark = f"AMPDBG_FUZZ={os.urandom(8).hex()}"
    variables = environment(**dict([mark.split("=")]), TMPDIR=str(temporary))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command(verb, "c.yaml", "--quiet"),
            cwd=folder,
            env=variables,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        process.send_signal(number)
        code = process.wait(60)
        deadline = time.monotonic() + ENDING
        while (left := list(_processes(mark))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"{left} go on after the program has ended"
        out.seek(0)
        err.seek(0)
        return Result(code, out.read().decode(), err.read().decode())


def _processes(mark: str) -> Iterator[str]:
    """The command lines of the processes with the mark in their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                yield (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
