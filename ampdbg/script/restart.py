"""Load a captured step into its script, which is restarted and waits at that step before it trains on.

The script is its own factory: it builds model, optimizers and loss as always. Its steps are recorded until one makes
the calls of the captured step. Then the captured weights, buffers, random state and arguments replace the script's.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path

import torch

from ampdbg.agreement import is_finite, is_same_run
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.environment import environment_of
from ampdbg.errors import first_line, named_error
from ampdbg.observer import Observer
from ampdbg.precision.emulation import is_emulating
from ampdbg.probes.half_names import CallNames
from ampdbg.probes.makings import Constructions
from ampdbg.probes.module_calls import run_eagerly
from ampdbg.probes.watch import Watch
from ampdbg.quantities import counted, number
from ampdbg.record.run import Investigation, Record, ScriptRun, Step, Unseen
from ampdbg.replay.investigation import blamed_data, fails
from ampdbg.replay.recorder import Recorder
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, Snapshot, failing_step
from ampdbg.replay.step import NotReplayableError, RecordedStep
from ampdbg.script.capture import Capture, CaptureError, Difference, Match
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.guard import FileGuard
from ampdbg.script.launch import Script, ScriptEnd, run_script
from ampdbg.script.ranks import alone

UNCHANGED_REPLAYS = 5
"""The number of replays that measure how often a step fails."""

MOST_STEPS, LONGEST = 50, 60.0
"""A script that has not made the captured step's calls after this many steps and seconds trains something else."""


@dataclass(frozen=True)
class RestoredStep:
    """The captured step in the script's own model.

    ``record`` is the record of the captured run up to the step, with the current time and this machine's environment.
    """

    run: Run
    recorded: RecordedStep
    snapshot: Snapshot
    capture: Capture
    record: Record

    def investigated(self, observer: Observer) -> Investigation:
        """Replay the step until its cause is known."""
        return self.capture.head.investigated(self.run, self.snapshot, self.record.steps[:-1], observer)

    def failing(self, made: Investigation) -> FailingStep:
        """Return the step with its weights."""
        return failing_step(self.run.workload.model, self.snapshot, self.capture.head.scale, made)

    def diagnosed(self, made: Investigation, command: str) -> Record:
        """Return the diagnosed record of the run up to the step that was investigated here."""
        notes = (*self.record.unseen.notes, *self._beside_the_run(made))
        *before, step = self.record.steps
        if made.reproduced and not is_finite(made.fp32):
            step = replace(step, nonfinite=blamed_data(self.run, self.snapshot, self.recorded))
        ended = replace(
            self.record, command=command, steps=(*before, step), investigations=(made,), elapsed=self.run.elapsed
        )
        return diagnose(replace(ended, unseen=Unseen(notes=notes)))

    def _beside_the_run(self, made: Investigation) -> Iterator[str]:
        """Yield notes on how the replays differ from the captured step."""
        head, there, here = self.capture.head, self.capture.record.environment, self.record.environment
        if made.tries == UNCHANGED_REPLAYS:
            yield f"step {made.step} fails in {made.reproduced} of {made.tries} unchanged replays"
        if head.why == "end" and not is_same_run(made):
            losses = f"was {number(head.loss)} when captured, and is {number(made.low.loss)} here"
            yield f"the loss of step {made.step} {losses}, so this replay cannot show faults that no loss shows"
        if head.start.processes > 1:
            yield (
                f"captured on rank {head.start.rank} of {head.start.processes}: a replay does not average its "
                "gradients with the others"
            )
        if torch.device(head.device).type != self.run.device.type:
            losses = f"its loss was {number(head.loss)} when captured, and is {number(made.low.loss)} here"
            yield f"captured on {there.device_name}, and replayed on {here.device}: {losses}"


Use = Callable[["RestoredStep | CaptureError"], None]
"""Receives the restored step, or the reason why it could not be loaded into the script."""


def restore_in_script(capture: Capture, use: Use, folder: Path, text: bytes | None = None) -> None:
    """Restart the script in this process, and call ``use`` with the captured step in its model.

    Errors of ``use`` propagate through the script. To skip the script's ``finally`` blocks, end the process in ``use``.

    Args:
        capture: the step.
        use: called at most once, in the middle of the script.
        folder: an empty temporary folder for copies of files that the script writes.
        text: replaces the content of the script's file.

    Raises:
        CaptureError: the script ended, or continued to train, without a step with the same calls.
    """
    start = capture.start
    script = Script(start.name, start.arguments, start.is_module, text=text)
    script.check()
    finder = _StepFinder(capture, use, folder)
    with ExitStack() as stack:
        stack.enter_context(finder.files.on())
        stack.enter_context(alone(has_launcher=capture.head.start.is_of_group))
        if capture.head.start.emulate or (capture.head.device.startswith("cuda") and not torch.cuda.is_available()):
            stack.enter_context(emulated_gpu(capture.head.start.processes))
        with finder.watcher, finder.recorder, finder.makings, run_eagerly():
            ended = run_script(script, finder.script_ended)
    if ended.error is not None and not finder.is_used:
        raise CaptureError(f"{start.name} raised {named_error(ended.error)}")
    if not finder.is_used:
        raise CaptureError(f"{capture.path}: {finder.why_not}")


WITHOUT_ITS_LOSS = (
    "step {} was captured without its loss: only its modules were replayed",
    "the sum of the module outputs replaces its loss",
)
"""Pins or a patch are then proven for the modules alone. Each note fits a line of the page."""

RESUMES = (
    "if it resumes from a file that it has written since, move that away, or start it with other arguments: "
    "--script 'SCRIPT ARGS...'"
)
NO_STEP = f"ended without a step; {RESUMES}"


REFUSED = "{} calls {} on {}, an existing file, which a replay never changes; make it write elsewhere: --script {}"


class _StepFinder:
    """Examines each step of a script until one has the captured calls."""

    def __init__(self, capture: Capture, use: Use, folder: Path) -> None:
        self.watcher = Watch(None, ())
        self.makings = Constructions()
        self.is_used = False
        self.files = FileGuard(folder, self.refuse)
        self._is_over = threading.Event()
        self._capture, self._use = capture, use
        self._folder, self._process = os.getcwd(), os.getpid()
        self._steps, self._began = 0, time.monotonic()
        self._nearest = Difference(-1, "no loss of its went backward")
        self._names = CallNames()
        self.recorder = Recorder(self._is_idle, self._on_pass_without_step, self._about_to_step, self._names.note)
        self.watcher.models.called = lambda: self.recorder.called
        self.watcher.ended = lambda is_bad: self._step_ended()
        self.watcher.went_backward = self.recorder.went_backward

    def _is_idle(self) -> bool:
        is_long = self._steps > MOST_STEPS and time.monotonic() - self._began > LONGEST
        return self.is_used or is_long or self.watcher.is_paused

    @property
    def why_not(self) -> str:
        """Why no step was found."""
        name = self._capture.start.name
        if self.watcher.failure:
            return f"{name} could not be followed: {self.watcher.failure}"
        if not self._steps and self._nearest.alike < 0:
            return f"{name} {NO_STEP}"
        nearest = "in the one most like it, " if self._steps > 1 else ""
        return (
            f"none of the {counted(self._steps, 'step')} of {name} is like the captured one; "
            f"{nearest}{self._nearest.reason}; {RESUMES}"
        )

    def refuse(self, event: str, path: str) -> CaptureError:
        """Stop the script before it changes a file. In a fork, or once the step is found, only return the error."""
        start = self._capture.start
        typed = shlex.quote(f"{start.typed} --output elsewhere")
        error = CaptureError(REFUSED.format(start.name, event, path, typed))
        if not self.is_used and os.getpid() == self._process:
            self.is_used = True
            self.files.remove_new()
            try:
                self._use(error)
            finally:
                self._is_over.set()
        return error

    def _step_ended(self) -> None:
        self._steps += 1

    def _about_to_step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        if not self._is_idle():
            self.watcher.learn()
            if optimizer in self.watcher.optimizers:
                self.watcher.begin_step_of(optimizer)
            self._look()

    def _on_pass_without_step(self) -> None:
        """Handle the start of another pass. A loop that steps only on finite values may never step, or never again."""
        if not self._is_idle() and (not self._steps or self.watcher.withholding is not None):
            self._look(self.recorder.lost_loss)

    def script_ended(self, ended: ScriptEnd) -> None:
        """Handle the end of the script while its objects are still alive. It may have ended in the captured step, or
        right after it."""
        if self.is_used:
            self._is_over.wait()  # the script trains in another thread, which still uses objects of this thread
        elif self.recorder.is_under_way or self.recorder.has_losses:
            self._steps += self.recorder.is_under_way
            self._look(self.recorder.lost_loss)

    def _look(self, loss: torch.Tensor | None = None) -> None:
        """Compare the current step with the captured one, as far as that one goes."""
        self.watcher.learn()
        self.watcher.optimizers.adopt(self.recorder.trained)
        model, optimizers = self.watcher.models.as_one_module(), tuple(self.watcher.optimizers)
        head = self._capture.head
        try:
            if head.reach == "whole":
                stepping, scale = self.watcher.stepping, float(self.watcher.open_step.loss_scale())
                known = 1.0 if head.scaler_number else head.scale
                recorded = self.recorder.step(model, optimizers, loss, stepping, scale, known)
            else:
                most = sum(call.training is not None for call in head.calls)  # only calls of modules have this flag
                recorded = self.recorder.modules(model, optimizers, most)
            different = next(Match(head, recorded).differences(), None) or self._capture.why_unlike(recorded)
        except NotReplayableError as reason:
            different = Difference(0, str(reason))
        if different is None:
            self._use_once(recorded)
        else:
            self._nearest = max(different, self._nearest, key=attrgetter("alike"))

    def _use_once(self, recorded: RecordedStep) -> None:
        self.is_used = True
        torch.clear_autocast_cache()
        with contextlib.suppress(OSError):
            os.chdir(self._folder)  # the script may work in a folder that it made, which is removed next
        self.files.remove_new()  # the script never continues, and a proof that restarts it must find the same files
        # The script may be inside an autocast region, as at the next pass of an accumulation.
        outside = torch.autocast(recorded.device.type, enabled=False)
        try:
            with self.watcher.paused(), torch.enable_grad(), outside:
                step: RestoredStep | CaptureError
                try:
                    step = self._restored(recorded)
                except CaptureError as error:
                    step = error
                except Exception as error:  # noqa: BLE001 - torch and the user's own code may raise anything
                    step = CaptureError(f"{self._capture.path}: {first_line(error)}")
                self._use(step)
        finally:
            self._is_over.set()

    def _restored(self, recorded: RecordedStep) -> RestoredStep:
        capture, optimizers = self._capture, tuple(self.watcher.optimizers)
        model, device = recorded.model, recorded.device
        notes = capture.put_into(model, optimizers)
        captured = replace(capture.step(recorded), state=capture.state(model))
        stepping = self.watcher.optimizers.stepping_with(capture.head.optimizer, capture.record.steps)
        run = captured.run(stepping, capture.head.half, self.watcher.calls.clip_grad_norm)
        run = replace(run, makings=self.makings, names=self._names.seen)
        snapshot = captured.snapshot(capture.head.step, capture.random_state(device))
        before = _of_capture(capture)
        if capture.head.reach != "whole":
            notes = (*notes, *(note.format(capture.head.step) for note in WITHOUT_ITS_LOSS))
        record = replace(
            before,
            environment=environment_of(device, run.config.precision.policy, emulated=is_emulating()),
            unseen=Unseen(notes=(*before.unseen.notes, *notes)),
        )
        return RestoredStep(run, captured, snapshot, capture, record)


def _of_capture(capture: Capture) -> Record:
    """Return the record of the same optimizer's steps up to and including the captured step."""
    head, start, before = capture.head, capture.start, capture.record
    is_bad = head.why != "end"
    earlier = [one for one in before.steps if one.step < head.step and one.optimizer == head.optimizer]
    iteration = max((one.iteration + 1 for one in earlier), default=0)
    step = Step(
        step=head.step,
        loss=head.loss,
        scale=head.scale,
        found_inf=is_bad,
        skipped=is_bad and head.scaler_number > 0,
        scaler=head.scaler_number,
        optimizer=head.optimizer,
        others=head.step - iteration,
    )
    script = ScriptRun(start.name, start.arguments, start.is_module, 0, (str(capture.path),))
    steps = (*earlier, step)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return replace(before, created=now, steps=steps, script=script, interrupted=False, error="")


def how_often(taken: RestoredStep, made: Investigation) -> Investigation:
    """Add to the investigation of a failing step how many of ``UNCHANGED_REPLAYS`` unchanged replays fail."""
    if made.why == "end":
        return made
    manner = Manner(taken.run.mode.format.name, taken.capture.head.scale, is_lifted=False)
    replays = [replay_step(taken.run, taken.snapshot, manner).replay for _ in range(UNCHANGED_REPLAYS)]
    return replace(made, reproduced=sum(fails(one, made.why) for one in replays), tries=UNCHANGED_REPLAYS)
