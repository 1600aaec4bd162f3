"""Commands on a capture, run in a new process that restarts the captured script and takes over at its step.

The process exits in the middle of the script, so that the script saves no checkpoint and closes no log.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ampdbg.diagnosis.ranges import diagnose_ranges
from ampdbg.errors import EXIT_INTERRUPTED, AmpdbgError, named_error
from ampdbg.observer import Observer
from ampdbg.pinning.bisection import Kept, search
from ampdbg.probes.tensors import HALVES
from ampdbg.proof.jobs import CapturedStep, FreshProcesses
from ampdbg.proof.processes import Deliver, FreshProcess, end_group
from ampdbg.proof.suggestion import Suggestion, suggestion_of
from ampdbg.record.pins import Form, Strategy
from ampdbg.replay.range_profile import profile_of
from ampdbg.script.capture import Capture, CaptureError
from ampdbg.script.restart import RestoredStep, how_often, restore_in_script

ENDING = 60.0
"""Seconds that an interrupted search may take to deliver its results."""


@dataclass(frozen=True)
class CaptureJob:
    """A command on a capture.

    A ``script`` that is not empty is started instead of the captured command line. ``strategy`` and ``max_trials`` are
    for a search, ``form`` and ``verify`` for a suggestion.
    """

    command: Literal["replay", "ranges", "bisect", "suggest-fp32"]
    path: Path
    script: tuple[str, ...] = ()
    strategy: Strategy = "guided"
    max_trials: int | None = None
    form: Form = "diff"
    verify: bool = True


def done_with(job: CaptureJob, process: FreshProcess, observer: Observer) -> Suggestion:
    """Run the job in a process started for it. The script's output goes to stderr.

    Raises:
        CaptureError: the capture or its script cannot be used.
        KeyboardInterrupt: interrupted before the search found anything.
    """
    capture = Capture(job.path, job.script)
    observer.stage(f"restarting {capture.start.name}, up to a step like step {capture.head.step}")
    process.begin(in_script, replace(job, path=job.path.absolute()), outlives=True)
    try:
        process.pass_on(observer)
        code = process.child.wait()
    except BaseException:
        code = _interrupted(process)
        if process.result() is None:
            raise
    outcome: Suggestion | AmpdbgError | None = process.result()
    if outcome is None:
        how = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        raise CaptureError(f"{job.path}: the process of {capture.start.name} ended before it was done: {how}")
    if isinstance(outcome, AmpdbgError):
        raise outcome
    return outcome


def _interrupted(process: FreshProcess) -> int:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.child.send_signal(signal.SIGINT)
        return process.child.wait(ENDING)
    process.child.kill()
    return process.child.wait()


def in_script(job: CaptureJob, observer: Observer, deliver: Deliver, folder: Path) -> None:
    """Restart the script and deliver the job's result."""

    def end(outcome: Suggestion | AmpdbgError) -> None:
        deliver(outcome)
        sys.stderr.flush()
        end_group(os.getpid())  # ends all processes that the script started, even if the parent no longer waits
        os._exit(0)

    def use(taken: RestoredStep | CaptureError) -> None:
        end(taken if isinstance(taken, CaptureError) else _outcome(taken, job, observer))

    try:
        restore_in_script(Capture(job.path, job.script), use, folder)
    except AmpdbgError as error:
        end(CaptureError(str(error)))  # drops attributes that cannot be pickled
    except Exception as error:  # noqa: BLE001 - the script may have modified torch, so anything may be raised
        end(CaptureError(f"{job.path}: {named_error(error)}"))


def _outcome(taken: RestoredStep, job: CaptureJob, observer: Observer) -> Suggestion | AmpdbgError:
    """Return the job's result. A signal before any result ends the process.

    Only the main thread gets KeyboardInterrupt. If the script trains in another thread, a signal ends the process.
    """
    if threading.current_thread() is threading.main_thread():
        _set_endings(_interrupt_once)
    try:
        return _WORK[job.command](taken, job, observer)
    except AmpdbgError as error:
        return CaptureError(str(error))
    except KeyboardInterrupt:
        os._exit(EXIT_INTERRUPTED)
    except BaseException as error:  # noqa: BLE001 - otherwise the script may catch it
        return CaptureError(f"{job.path}: {named_error(error)}")


def _interrupt_once(number: int, frame: object) -> None:
    """Interrupt once. A batch system signals all processes, and then the waiting parent sends SIGINT again."""
    _set_endings(signal.SIG_IGN)
    raise KeyboardInterrupt


def _set_endings(handler: Callable[[int, Any], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


OUTSIDE_OF_AUTOCAST = (
    "its weights are stored in {} and its step runs outside of autocast, which patches rely on: keep the weights in "
    "float32, and run the step under torch.autocast"
)


def _replayed(taken: RestoredStep, job: CaptureJob, observer: Observer) -> Suggestion:
    made = taken.investigated(observer)
    return Suggestion(taken.diagnosed(how_often(taken, made), "replay"))


def _measured(taken: RestoredStep, job: CaptureJob, observer: Observer) -> Suggestion:
    observer.replay(taken.snapshot.step, "bfloat16, every op measured")
    profile = profile_of(taken.run, taken.snapshot)
    unseen = replace(profile.unseen, notes=(*taken.record.unseen.notes, *profile.unseen.notes))
    seen = replace(taken.record, command="ranges", sites=profile.sites, checks=profile.checks, unseen=unseen)
    return Suggestion(diagnose_ranges(replace(seen, elapsed=taken.run.elapsed)))


def _bisected(taken: RestoredStep, job: CaptureJob, observer: Observer) -> Suggestion:
    made = taken.investigated(observer)
    kept: Kept = {(made.step, made.why): taken.failing(made)}
    record = taken.diagnosed(made, "bisect")
    if record.half_weights and not record.has_masters and record.verdict == "precision":
        if job.command == "bisect":
            stored, again = record.half_weights[0], f"ampdbg suggest-fp32 {shlex.quote(str(job.path))}"
            raise CaptureError(
                f"{job.path}: its weights are stored in {stored}, and no pin changes that; type: {again}"
            )
        return Suggestion(replace(record, command=job.command))
    ended = search(taken.run, record, kept, job.strategy, job.max_trials, observer)
    if job.command == "bisect":
        return Suggestion(ended.record)
    with FreshProcesses(ended.run.config.start) as start:
        captured = CapturedStep(job.path, made, job.script)
        start_job = start if job.verify else None
        return suggestion_of(ended, job.form, start_job, observer, captured, _why_no_patch(taken))


def _why_no_patch(taken: RestoredStep) -> str:
    """Return the reason why the step's half computations cannot be patched, or ""."""
    is_lowered = any(taken.run.device.type in call.lowers for call in taken.recorded.calls.values())
    dtypes = {parameter.dtype for parameter in taken.run.workload.model.parameters()}
    half = [str(dtype).removeprefix("torch.") for dtype in HALVES if dtype in dtypes]
    return "" if is_lowered or not half else OUTSIDE_OF_AUTOCAST.format(half[0])


_WORK: Mapping[str, Callable[[RestoredStep, CaptureJob, Observer], Suggestion]] = {
    "replay": _replayed,
    "ranges": _measured,
    "bisect": _bisected,
    "suggest-fp32": _bisected,
}
