"""A captured step put into the script that it is of: that is started again, and taken over before it trains.

The script is its own factory: it builds model, optimizers and loss as it always does. Its steps are taped until one
makes the calls of the captured one; then the captured weights, buffers, random state and arguments take the place of
its own.
"""

from __future__ import annotations

import contextlib
import os
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
from ampdbg.probes.makings import Makings
from ampdbg.probes.module_calls import run_eagerly
from ampdbg.probes.watch import Watch
from ampdbg.quantities import counted, listed, number
from ampdbg.record.run import Investigation, Record, ScriptRun, Step, Unseen
from ampdbg.replay.investigation import investigate
from ampdbg.replay.open_pass import OpenPass
from ampdbg.replay.pass_end import losses_of
from ampdbg.replay.played_step import PlayedStep
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, Snapshot, failing_step
from ampdbg.replay.step_data import blamed_data, snapshot_of
from ampdbg.replay.tape import NOT_ALL_SEEN, Tape, taping
from ampdbg.script.capture import Capture, CaptureError
from ampdbg.script.captured_calls import Difference
from ampdbg.script.file_functions import scratch_files
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.launch import Script, ScriptEnd, run_script
from ampdbg.script.loop_step import REPLACED
from ampdbg.script.played_run import run_of
from ampdbg.script.ranks import alone
from ampdbg.script.scratch_files import ScratchFiles
from ampdbg.script.temporaries import noted_temporaries

AGAIN = 5
"""So many replays tell how often a step fails."""

MOST_STEPS, LONGEST = 50, 60.0
"""A script that has not made the calls of the captured step in so many steps, nor in so many seconds, trains something
else."""

MOST_ON_A_TAPE = 4
"""Steps. Of several optimizers one may end its step only when the forward pass of the next is over: a tape that begins
then has not seen that, and goes on: the next such step is seen whole."""


@dataclass(frozen=True)
class TakenOver:
    """The captured step in the script's own model.

    ``record`` is that of the run that was captured, up to the step, as of now and of this machine.
    """

    run: Run
    played: PlayedStep
    snapshot: Snapshot
    capture: Capture
    record: Record

    @property
    def has_loss(self) -> bool:
        """Whether the step came to a loss: else the sum of what its modules give stands for it."""
        return not self.capture.head.is_broken_off or losses_of(self.played) > 0

    def investigated(self, observer: Observer) -> Investigation:
        """Replays the step until its cause can be told."""
        head, has_loss = self.capture.head, self.has_loss
        made = investigate(
            self.run,
            self.snapshot,
            head.why,
            head.scale,
            before=self.record.steps if has_loss else (),  # a sum of other numbers is not to be compared with losses
            weights_grew=head.weights_grew,
            observer=observer,
        )
        return replace(made, loss=head.loss, reach="whole" if has_loss else "modules", replaced=head.replaced)

    def failing(self, made: Investigation) -> FailingStep:
        """The step, with its weights."""
        return failing_step(self.run.workload.model, self.snapshot, self.capture.head.scale, made)

    def diagnosed(self, made: Investigation, command: str) -> Record:
        """The record of the run up to the step, which was investigated here."""
        notes = (*self.record.unseen.notes, *self._beside_the_run(made))
        *before, step = self.record.steps
        if made.reproduced and not is_finite(made.fp32):
            bad = blamed_data(self.run, self.snapshot, self.played, self.capture.head.computed)
            step, made = replace(step, nonfinite=bad.batch), replace(made, computed_inputs=bad.spoilt)
        ended = replace(
            self.record, command=command, steps=(*before, step), investigations=(made,), elapsed=self.run.elapsed
        )
        return diagnose(replace(ended, unseen=Unseen(notes=notes)))

    def _beside_the_run(self, made: Investigation) -> Iterator[str]:
        """How the replays compare with the step as it was captured."""
        head, there, here = self.capture.head, self.capture.record.environment, self.record.environment
        if made.replaced:
            yield REPLACED.format(made.step, listed(made.replaced))
        if made.tries == AGAIN:
            yield f"step {made.step} as it was fails in {made.reproduced} of {made.tries} replays"
        if head.why == "end" and not is_same_run(made):
            losses = f"was {number(head.loss)} there, and is {number(made.low.loss)} here"
            yield f"the loss of step {made.step} {losses}: what shows in no loss cannot be told"
        if head.start.processes > 1:
            yield f"captured on rank {head.start.rank} of {head.start.processes}: here its gradients are not averaged"
        if torch.device(head.device).type != self.run.device.type:
            losses = f"its loss was {number(head.loss)} there, and is {number(made.low.loss)} here"
            yield f"captured on {there.device_name}, and replayed on {here.device}: {losses}"


Use = Callable[["TakenOver | CaptureError"], None]
"""Takes a step that was taken over, or why it could not be put into the script."""


def take_over(capture: Capture, use: Use, files: Path, text: bytes | None = None) -> None:
    """Starts the script again, in this process, and calls ``use`` with the captured step in its model.

    What ``use`` raises goes through the script: who does not want its ``finally`` to run ends the process in it.

    Args:
        capture: the step.
        use: called at most once, in the middle of the script.
        files: a folder of its own, for what the script would write over.
        text: what the script's file is taken to hold.

    Raises:
        CaptureError: the script ended, or trained on, without a step of the same calls.
    """
    start = capture.start
    script = Script(start.name, start.arguments, start.is_module, text=text)
    script.check()
    taking = _Taking(capture, use)
    with ExitStack() as stack:
        stack.enter_context(noted_temporaries(files))
        taking.scratch = stack.enter_context(scratch_files(files))
        stack.enter_context(alone(has_launcher=capture.head.start.is_of_group))
        if capture.head.start.emulate or (capture.head.device.startswith("cuda") and not torch.cuda.is_available()):
            stack.enter_context(emulated_gpu(capture.head.start.processes))
        with taking.watcher, taking.open_pass, taking.makings:
            taking.begin_when_known()
            try:
                ended = run_script(script, taking.script_ended)
            finally:
                taking.end()
    if ended.error is not None and not taking.is_used:
        raise CaptureError(f"{start.name} raised {named_error(ended.error)}")
    if not taking.is_used:
        raise CaptureError(f"{capture.path}: {taking.why_not}")


WITHOUT_ITS_LOSS = (
    "step {} was captured without its loss: its modules alone were run again",
    "a loss told of here is the sum of all that they give",
)
"""So a set of pins, or a patch, is proven for them alone. Each fits a line of the page."""

NO_STEP = (
    "ended without a step; where it goes on from a file that it has written since, move that away, "
    "or start it with other arguments: --script 'SCRIPT ARGS...'"
)


class _Taking:
    """Tapes each step of a script, until one is of the captured calls."""

    def __init__(self, capture: Capture, use: Use) -> None:
        self.watcher = Watch(None, ())
        self.makings = Makings()
        self.is_used = False
        self._is_over = threading.Event()
        self._capture = capture
        self._use = use
        self._folder = os.getcwd()
        self.scratch: ScratchFiles | None = None
        self._steps, self._began = 0, time.monotonic()
        self._on_tape, self._is_late = 0, False
        self._nearest = Difference(-1, "the first one shows what it trains: it has to make two")
        self._names = CallNames()
        self._entered = ExitStack()
        self.open_pass = OpenPass(self.watcher, self._next_begins)
        self.watcher.models.called = lambda: self.open_pass.called

    @property
    def why_not(self) -> str:
        """Why nothing was taken over."""
        name = self._capture.start.name
        if self.watcher.failure:
            return f"{name} could not be followed: {self.watcher.failure}"
        if not self._steps:
            return f"{name} {NO_STEP}"
        nearest = "in the one most like it, " if self._steps > 1 else ""
        return (
            f"{name} made no step like the captured one, of {counted(self._steps, 'step')} that it made; "
            f"{nearest}{self._nearest.reason}"
        )

    def begin_when_known(self) -> None:
        """Tapes from the second step on: by then the models and optimizers are known."""
        self.watcher.ended = lambda is_bad: self._step_ended()

    def end(self) -> None:
        """Leaves torch as it was."""
        self._entered.close()

    def _step_ended(self) -> None:
        self._steps += 1
        is_long = self._steps > MOST_STEPS and time.monotonic() - self._began > LONGEST
        is_over = self.is_used or is_long
        if self._is_late and not is_over and self._on_tape < MOST_ON_A_TAPE:
            self._on_tape += 1
            return
        self.end()
        if not is_over:
            self._begin()

    def _begin(self) -> None:
        """Tapes from now on."""
        self._on_tape, self._is_late = 1, False
        self.watcher.optimizers.adopt(self.open_pass.trained)
        model = self.watcher.models.together()
        device = _device_type(model)
        self._names = CallNames()
        tape = Tape(model, device, self.end, self._names.note, self._capture.own_calls)
        self._entered.enter_context(run_eagerly())
        self._entered.enter_context(taping(tape, lambda optimizer, scaler: self._about_to_step(tape)))

    def _about_to_step(self, tape: Tape) -> None:
        if self.is_used or self.watcher.is_paused or not tape.is_of_this_thread:
            return
        if self._capture.head.is_broken_off:
            self._take_forward_pass()
        else:
            played = tape.played()
            self._is_late |= played is None and tape.why_not == NOT_ALL_SEEN
            self._take(played, tape.why_not)
        if not self.is_used:
            tape.stepped_on()

    def script_ended(self, ended: ScriptEnd) -> None:
        """To be called when the script has ended, while what it holds is still alive: maybe in the captured step, or
        right behind it."""
        if self.is_used:
            self._is_over.wait()  # the script trains in another thread, which still uses what is to end with this one
        self.end()
        is_noted = self.open_pass.is_under_way or self.open_pass.has_gone_backward
        if not self.is_used and self._capture.head.is_broken_off and is_noted:
            self.watcher.learn()
            self._steps += self.open_pass.is_under_way
            self._take_forward_pass()

    def _next_begins(self) -> None:
        """Called when another pass begins: a loop may step only on what is finite, and so never."""
        if not self.is_used and self._capture.head.is_broken_off and not self._steps:
            self.watcher.learn()
            self.watcher.optimizers.adopt(self.open_pass.trained)
            self._take_forward_pass()

    def _take_forward_pass(self) -> None:
        """Takes the pass of this step up to where the captured one was broken off."""
        model = self.watcher.models.together()
        device = _device_type(model)
        for most in range(len(self._capture.head.calls), 0, -1):
            if self.is_used:
                return
            self._take(self.open_pass.played(model, device, most), "its calls cannot be made again")

    def _take(self, played: PlayedStep | None, why_not: str) -> None:
        model = self.watcher.models.together()
        different = self._capture.match(played).why_not(model) if played is not None else Difference(0, why_not)
        if different is not None:
            self._nearest = max(different, self._nearest, key=attrgetter("alike"))
        elif played is not None:
            self._use_once(played, model)

    def _use_once(self, played: PlayedStep, model: torch.nn.Module) -> None:
        self.is_used = True
        self.end()
        torch.clear_autocast_cache()
        with contextlib.suppress(OSError):
            os.chdir(self._folder)  # a script may work in one of its own, which goes with what is new
        if self.scratch is not None:
            self.scratch.remove_new()  # the script goes on no more: a proof that starts it is to find what it found
        # The script may be within a region of autocast's, as at the next pass of an accumulation.
        outside = torch.autocast(_device_type(model), enabled=False)
        try:
            with self.watcher.paused(), torch.enable_grad(), outside:
                self._use(self._taken_or_why_not(played, model))
        finally:
            self._is_over.set()

    def _taken_or_why_not(self, played: PlayedStep, model: torch.nn.Module) -> TakenOver | CaptureError:
        try:
            return self._taken(played, model)
        except CaptureError as error:
            return error
        except Exception as error:  # noqa: BLE001 - torch and the user's own code may raise anything
            return CaptureError(f"{self._capture.path}: {first_line(error)}")

    def _taken(self, played: PlayedStep, model: torch.nn.Module) -> TakenOver:
        capture, optimizers = self._capture, tuple(self.watcher.optimizers)
        device = next(model.parameters()).device
        notes = capture.put_into(model, optimizers)
        captured = capture.played(played, device)
        run = run_of(captured, model, optimizers, device, capture.head.half)
        run = replace(run, makings=self.makings, names=self._names.seen)
        snapshot = snapshot_of(captured, capture.head.step, capture.random_state(device), capture.state(device))
        before = _of_capture(capture)
        if capture.head.is_broken_off and not losses_of(captured):
            notes = (*notes, *(note.format(capture.head.step) for note in WITHOUT_ITS_LOSS))
        record = replace(
            before,
            environment=environment_of(device, run.config.precision.policy, emulated=is_emulating()),
            unseen=Unseen(notes=(*before.unseen.notes, *notes)),
        )
        return TakenOver(run, captured, snapshot, capture, record)


def _device_type(model: torch.nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _of_capture(capture: Capture) -> Record:
    """The record of the run up to the step, and that as well."""
    head, start, before = capture.head, capture.start, capture.record
    is_bad = head.why != "end"
    latest = head.scaler_number or (before.steps[-1].scaler if before.steps else 1)
    step = Step(
        step=head.step,
        loss=head.loss,
        scale=head.scale,
        found_inf=is_bad,
        skipped=is_bad and head.scaler is not None,
        scaler=latest if head.scaler is not None else 0,
    )
    script = ScriptRun(start.name, start.arguments, start.is_module, 0, (str(capture.path),))
    steps = (*(one for one in before.steps if one.step < head.step), step)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return replace(before, created=now, steps=steps, script=script, interrupted=False, error="")


def how_often(taken: TakenOver, made: Investigation) -> Investigation:
    """The investigation with how often a step that went wrong does as it was, of ``AGAIN`` replays."""
    if made.why == "end":
        return made
    manner = Manner(taken.run.mode.format.name, taken.capture.head.scale, is_lifted=False)
    replays = [replay_step(taken.run, taken.snapshot, manner).replay for _ in range(AGAIN)]
    return replace(made, reproduced=sum(not is_finite(one) for one in replays), tries=AGAIN)
