"""The step in which a script ends: its loss is NaN and it exits, or it raises what it would not raise in FP32."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from typing import get_args

import torch

from ampdbg.errors import first_line
from ampdbg.formats import FORMATS
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.probes.tensors import nonfinite_in_batch
from ampdbg.probes.torch_errors import autocast_error
from ampdbg.probes.watch import Watch
from ampdbg.record.run import EXITED, Investigation, Record
from ampdbg.replay.investigation import investigate, is_blamed
from ampdbg.replay.open_pass import OpenPass, losses_of
from ampdbg.replay.played_step import PlayedStep
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.snapshot import ModelState, Snapshot
from ampdbg.script.captures import Captured, Captures
from ampdbg.script.launch import ScriptEnd
from ampdbg.script.played_run import Half, run_of
from ampdbg.script.ranks import is_in_group
from ampdbg.script.traced_steps import hushed


class LastStep:
    """The step that a script has under way when it ends, run again where that is with an error or an exit code.

    Args:
        watcher: of the loop.
        captures: where the step goes.
        observer: told before the step is run again.
        investigates: it may be run again.
    """

    def __init__(self, watcher: Watch, captures: Captures, observer: Observer, *, investigates: bool) -> None:
        self.open_pass = OpenPass(lambda: watcher.is_paused, lambda: watcher.backward_passes)
        """Notes the step, and is to be entered while the script runs."""
        self._watcher = watcher
        self._captures = captures
        self._observer = observer
        self._investigates = investigates
        self._owner = os.getpid()
        self._made: Investigation | None = None
        self._why = ""

    def ended(self, ending: ScriptEnd) -> None:
        """To be called when the script has ended, while what it holds is still alive."""
        if ending.error is not None:
            self._watcher.calls.failed(ending.error)
        is_stopped = ending.code == 0 or isinstance(ending.error, KeyboardInterrupt)
        is_forked = os.getpid() != self._owner
        if is_stopped or is_forked or self._watcher.failure or not self.open_pass.is_under_way:
            return
        if is_told(self._watcher, ending.error):
            return
        # Whatever it raises, such as that there is no memory for it, the script ends as it does.
        with contextlib.suppress(Exception):
            self._watcher.learn()
            how = f"the script raised {type(ending.error).__name__}" if ending.error else f"{EXITED} {ending.code}"
            step = self._watcher.log.closed()
            self._why = f"{how} in step {step}, after a forward pass from which nothing went backward"
            self._look()
        self.open_pass.forget()

    def seen(self, record: Record) -> Record:
        """A record of the loop with what was found in its last step, or with why nothing was."""
        found = () if self._made is None else (self._made,)
        error = "\n".join(filter(None, (record.error, self._why)))
        return replace(record, error=error, investigations=(*record.investigations, *found))

    def _look(self) -> None:
        model = self._watcher.models.together()
        device = next((parameter.device for parameter in model.parameters()), None)
        half = None if device is None else self._half(model, device)
        if device is None or half is None or not self._investigates:
            return
        if is_in_group():
            self._why += "; a step of a group is not run again"
            return
        played = self.open_pass.played(model, device.type)
        if played is None:
            self._why += "; its calls cannot be made again"
            return
        self._observer.ended_in(self._watcher.log.closed())  # here, for behind this nothing is shown
        made = self._investigated(played, model, device, half)
        too = self._too(made, is_of_losses=losses_of(played) > 0)
        if too:
            self._why += f". Run again, {too}"
            return
        self._why = ""
        self._capture(played, model, half, made)
        self._made = made
        # One with infinities may be a mask.
        bad = nonfinite_in_batch(self.open_pass.batch)
        self._watcher.log.batch += [counts for counts in bad if counts.nan]
        self._watcher.broke_off(made.replays[0].loss)

    def _too(self, made: Investigation, *, is_of_losses: bool) -> str:
        """What replays show of it where they do not show that precision is the cause, nor that it is not."""
        low, *others = made.replays
        if not made.reproduced:
            short = FORMATS[low.dtype].short
            return f"what its modules give is finite in {short}: look at what the script makes of that"
        if low.error and others[0].error:
            return f"it raises an error in FP32 too, and precision is not the cause: {others[0].error}"
        if low.error and not is_blamed(made):
            return f"it raises that in {FORMATS[low.dtype].short} and not in FP32, and no op was found that goes wrong"
        if not is_of_losses and not math.isfinite(others[0].loss):
            return "what its modules give is not finite, and in FP32 neither"
        return ""

    def _half(self, model: torch.nn.Module, device: torch.device) -> Half | None:
        """What autocast lowers to in it, or what the weights are."""
        dtypes = [self.open_pass.lowers_to(device.type), *{parameter.dtype for parameter in model.parameters()}]
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None]
        return next((half for name in names for half in get_args(Half) if half == name), None)

    def _investigated(
        self, played: PlayedStep, model: torch.nn.Module, device: torch.device, half: Half
    ) -> Investigation:
        watcher = self._watcher
        run = run_of(played, model, tuple(watcher.optimizers), device, half)
        steps = watcher.steps
        before = steps if losses_of(played) == 1 else ()  # a sum of other numbers is not to be compared with losses
        with watcher.paused(), hushed(), torch.enable_grad():
            snapshot = Snapshot(watcher.log.closed(), played.given, RandomState.now(), ModelState.now(model))
            return investigate(run, snapshot, "loss", self._scale, before=before, observer=UNOBSERVED)

    @property
    def _scale(self) -> float:
        return self._watcher.steps[-1].scale if self._watcher.steps else 1.0

    def _capture(self, played: PlayedStep, model: torch.nn.Module, half: Half, made: Investigation) -> None:
        step = self._watcher.log.closed()
        try:
            with self._watcher.paused(), torch.no_grad():
                captured = Captured(
                    played=played,
                    model=model,
                    state=ModelState.now(model),
                    optimizers=tuple(self._watcher.optimizers),
                    scaler=None,
                    step=step,
                    scale=self._scale,
                    loss=made.replays[0].loss,
                    why="loss",
                    half=half,
                    record=self._watcher.record(),
                    start=self._captures.start,
                    is_broken_off=True,
                )
                self._captures.add(captured)
        except Exception as error:  # noqa: BLE001 - whatever it raises, what was found is told
            self._captures.cannot(step, f"{type(error).__name__}: {first_line(error)}")


def is_told(watcher: Watch, error: BaseException | None) -> bool:
    """Whether an error that the script has raised tells by itself what is wrong."""
    by_autocast = autocast_error(error, watcher.log.closed(), watcher.models.named_modules)
    return by_autocast is not None or watcher.calls.explains(error)
