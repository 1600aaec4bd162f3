"""A process of its own for an experiment of a proof: both of its sides, and the failing steps that it is given."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from ampdbg.errors import AmpdbgError, UserCodeError
from ampdbg.observer import Observer
from ampdbg.proof.experiments import perform
from ampdbg.proof.jobs import Job, Seen, first_line
from ampdbg.replay.snapshot import FailingStep
from ampdbg.workload import Workload

STALLED = 1800.0
"""Seconds without a sign of life after which a process is taken to hang; one comes at least with every step."""

ENDING = 30.0
"""Seconds that a process may take to end once it has said all: the user's code may have left threads behind."""

POLL = 0.5

# Imports are to be found where they are in this process. `python -m` would look into the working folder first,
# where a file may have the name of a module of Python's own.
_START = "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); from ampdbg.proof.process import main; main()"


def in_fresh_process(job: Job, steps: Path, observer: Observer, stalled: float = STALLED) -> Seen:
    """Runs a job in a process of its own; its failure, crash or hang is the ``failure`` of what was seen.

    Args:
        job: what to run.
        steps: the file with the failing steps.
        observer: sees what the process is about to run.
        stalled: seconds without a sign of life after which it is ended.
    """
    with tempfile.TemporaryDirectory(prefix="ampdbg-proof-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        task, result, output = folder / "task", folder / "result.json", folder / "output"
        given = (job, steps, torch.get_num_threads(), sys.argv)
        try:
            with _started(given, job.config.start, task, result, output) as child:
                failure = _followed(child, observer, stalled) or _ended(child)
        except OSError as error:
            return Seen(failure=f"no process can be started: {error}")
        if result.exists():
            return Seen.model_validate_json(result.read_bytes())
        return Seen(failure=": ".join(filter(None, (failure, _last_line(output)))))


def main() -> None:
    """The side that runs in the process: takes a task and the path of the result from the command line."""
    task, result = map(Path, sys.argv[1:3])
    stages = _standard_output_for_stages()
    # The user's code is to find the command line that it has found before.
    job, steps, threads, sys.argv = pickle.loads(task.read_bytes())
    torch.set_num_threads(threads)
    seen = perform(job, lambda run: load_steps(steps, run.workload), _StagesTo(stages))
    whole = result.with_suffix(".part")
    whole.write_text(seen.model_dump_json(), encoding="utf-8")
    os.replace(whole, result)


class _StagesTo(Observer):
    """Writes a line for each stage."""

    def __init__(self, stages: IO[str]) -> None:
        self._stages = stages

    def stage(self, doing: str) -> None:
        print(doing, file=self._stages, flush=True)


def _standard_output_for_stages() -> IO[str]:
    """The pipe to the other side. What the user's code prints goes to stderr from now on."""
    stages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stages


@contextlib.contextmanager
def _started(
    given: object, working_folder: Path, task: Path, result: Path, output: Path
) -> Iterator[subprocess.Popen[str]]:
    """The process, in one group with workers that it starts; whatever happens on this side, they end with it."""
    command = [sys.executable, "-c", _START, str(task), str(result), os.pathsep.join(sys.path)]
    task.write_bytes(pickle.dumps(given))
    with output.open("wb") as stderr:
        child = subprocess.Popen(
            command,
            cwd=working_folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
            start_new_session=True,
        )
    with child:
        try:
            yield child
        finally:
            if child.poll() is None:
                _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    if sys.platform == "win32":
        child.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _followed(child: subprocess.Popen[str], observer: Observer, stalled: float) -> str:
    """Passes its stages on until it closes its output; returns what is wrong when it gives no sign of life."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(child, lines.put), daemon=True).start()
    last = time.monotonic()
    while time.monotonic() - last < stalled:
        try:
            # Not all at once: on Windows nothing interrupts a wait.
            line = lines.get(timeout=min(POLL, stalled))
        except queue.Empty:
            continue
        if line is None:
            return ""
        last = time.monotonic()
        if line:
            observer.stage(line)
    return f"its process hangs: no sign of life for {stalled:g} seconds"


def _read(child: subprocess.Popen[str], put: Callable[[str | None], None]) -> None:
    with contextlib.suppress(ValueError):  # it is closed under the reader when the process is ended
        for line in child.stdout or ():
            put(line.strip())
    put(None)


def _ended(child: subprocess.Popen[str]) -> str:
    """How the process ended, where it has left no result."""
    try:
        code = child.wait(ENDING)
    except subprocess.TimeoutExpired:
        return "its process does not end"
    return (
        f"its process ended by a signal: {signal.strsignal(-code)}"
        if code < 0
        else f"its process ended with exit code {code}"
    )


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# The failing steps, written to a file


def save_steps(steps: Sequence[FailingStep], path: Path) -> None:
    """Writes the steps with their batches, random states, buffers, attributes and weights.

    Raises:
        AmpdbgError: a batch holds what cannot be pickled, or the disk is full; the message is one line.
    """
    try:
        torch.save([_compact(step) for step in steps], path)
    except Exception as error:
        # Pickling runs the code of whatever a batch holds, which may raise anything.
        raise AmpdbgError(first_line(error)) from error


def load_steps(path: Path, workload: Workload) -> tuple[FailingStep, ...]:
    """Reads what :func:`save_steps` wrote, tensors on the devices that they were on.

    Args:
        path: a file that this ampdbg has written itself, a moment ago: only so may all of pickle be allowed in it
            (``weights_only=False``), which a batch of any class needs.
        workload: it is built, so that the modules that define those classes can be found.

    Raises:
        AmpdbgError: a class of a batch is not to be found in this process.
    """
    try:
        with workload.user.running("reading the failing steps"):
            return tuple(torch.load(path, weights_only=False))
    except UserCodeError as error:
        raise AmpdbgError(first_line(error.__cause__ or error)) from error


def _compact(step: FailingStep) -> FailingStep:
    return replace(step, snapshot=replace(step.snapshot, state=step.snapshot.state.for_another_model()))
