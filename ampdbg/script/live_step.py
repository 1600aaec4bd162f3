"""The step that a watched loop has under way, to be run again and captured while its weights are those that it had."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.agreement import is_finite
from ampdbg.observer import Observer
from ampdbg.ops import EXCHANGES
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Investigation, Step
from ampdbg.replay.investigation import Why, investigate
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import ModelState, Snapshot
from ampdbg.replay.step import Half, RecordedStep
from ampdbg.replay.step_data import blamed_data
from ampdbg.script.ranks import is_in_group
from ampdbg.script.signals import have_come, held_signals


@dataclass(frozen=True)
class LiveStep:
    """The step that a watched loop has under way, with the weights that it had.

    Args:
        number: counted from 0.
        watcher: of the loop; it is paused while the step is run again.
        recorded: what the step has called.
        model: whose weights count.
        device: where its weights are.
        state: that of the model when the step began.
        half: what the step lowers to; None where it lowers to nothing.
        scale: its loss scale.
        why: what calls for a closer look.
        why_no_further: why it is run again no further than its modules.
        optimizer: the place of that which steps in it.
        rewritten: as of an investigation.
    """

    number: int
    watcher: Watch
    recorded: RecordedStep
    model: torch.nn.Module
    device: torch.device
    state: ModelState
    half: Half | None
    scale: float
    why: Why
    why_no_further: str = ""
    optimizer: int = 0
    rewritten: Mapping[str, float] = field(default_factory=dict)

    @property
    def before(self) -> tuple[Step, ...]:
        """The steps that its loss is to be compared with."""
        return self.recorded.before(self.watcher.steps, self.optimizer)

    @property
    def loss(self) -> float:
        """Its loss, without the scale that the script itself has put into it; NaN of none."""
        losses = self.watcher.open_step.scaled
        return sum(map(float, losses)) / self.recorded.own_scale if losses else math.nan

    @property
    def scaler_number(self) -> int:
        """That of the scaler of its loss in the record; 0 of none."""
        scaler = self.watcher.open_step.scaler
        return 0 if scaler is None else self.watcher.calls.number_of(scaler)

    def investigated(self) -> Investigation | None:
        """What replays of it show. The script waits.

        None where a signal has come meanwhile that the script handles itself: it is not kept waiting any longer.

        Raises:
            Exception: whatever the script's own code raises, or that there is no memory for it.
        """
        loss, grew = self.loss, self.watcher.optimizers.weights_grew
        with self._again() as (run, snapshot), contextlib.suppress(_SignalCameError):
            made = investigate(run, snapshot, self.why, self.scale, before=self.before, observer=_UntilASignal())
            if made.reproduced and not is_finite(made.fp32):
                self.watcher.log.batch += blamed_data(run, snapshot, self.recorded)
            made = replace(made, loss=loss, weights_grew=grew, rewritten=self.rewritten)
            return replace(made, reach=self.recorded.reach, why_no_further=self.why_no_further)
        return None

    @contextlib.contextmanager
    def _again(self) -> Iterator[tuple[Run, Snapshot]]:
        """What it takes to run it again, while the script waits and sees nothing of that."""
        clip_grad_norm = self.watcher.calls.clip_grad_norm
        optimizers = self.watcher.optimizers.stepping_with(self.optimizer, self.watcher.steps)
        run = self.recorded.run(self.model, optimizers, self.device, self.half, clip_grad_norm)
        snapshot = self.recorded.snapshot(self.number, RandomState.now(), self.state)
        # The script may be within a region of autocast's.
        outside = torch.autocast(self.device.type, enabled=False)
        apart = _Apart() if is_in_group() else contextlib.nullcontext()
        with self.watcher.paused(), held_signals(), _hushed(), torch.enable_grad(), outside, apart:
            try:
                yield run, snapshot
            finally:
                self.watcher.left_by_replays |= snapshot.left
        torch.clear_autocast_cache()  # where the script steps within a region, it has casts of altered weights


class _Apart(TorchDispatchMode):
    """While this is entered no op waits for other processes, which are not running the step again."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in EXCHANGES:
            raise RuntimeError(f"it waits for other processes, in {op}")
        return op(*args, **(kwargs or {}))


class _SignalCameError(Exception):
    """A signal waits for the script to handle it."""


class _UntilASignal(Observer):
    """Breaks replays off between two of them, for a batch system gives a script half a minute to save its model."""

    def replay(self, step: int, doing: str) -> None:
        """Another replay is about to run.

        Raises:
            _SignalCameError: not while a signal waits.
        """
        if have_come():
            raise _SignalCameError


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """While this is entered what this thread prints is not shown: it has been, when the step ran first."""
    with contextlib.redirect_stdout(_Hushed(sys.stdout)), contextlib.redirect_stderr(_Hushed(sys.stderr)):
        yield


class _Hushed(io.TextIOBase):
    """A stream that writes what other threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        """Writes it, unless it is this thread's."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        """As the stream's own."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
