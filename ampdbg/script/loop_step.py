"""One step of a loop that is not ours, while its weights are those that it had: run again, and captured."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

import torch

from ampdbg.observer import Observer
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Investigation, Step
from ampdbg.replay.investigation import Why, investigate
from ampdbg.replay.played_step import PlayedStep
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import ModelState, Snapshot
from ampdbg.replay.step_data import BadData, blamed_data, snapshot_of, with_finite_data
from ampdbg.script.captures import Captured, Captures
from ampdbg.script.played_run import Half, run_of
from ampdbg.script.signals import have_come, held_signals

RUN_AGAIN = "FP16, FP32 and more"
"""What is told of a step before it is run again."""

REPLACED = "step {} was run again with finite numbers in the place of {}, which it may have computed itself"
"""Where a teacher has given inf or NaN, say."""


@dataclass(frozen=True)
class LoopStep:
    """The step that a watched loop has under way, as it can be run again.

    Args:
        step: its number.
        watcher: of the loop; it is paused meanwhile.
        played: what the step has called.
        model: whose weights count.
        device: where its weights are.
        state: that of the model when the step began.
        half: what the step lowers to; None where it lowers to nothing.
        scale: its loss scale.
        why: what calls for a closer look.
        computed: the names of what looks like data of the step, and the step itself may have computed.
    """

    step: int
    watcher: Watch
    played: PlayedStep
    model: torch.nn.Module
    device: torch.device
    state: ModelState
    half: Half | None
    scale: float
    why: Why
    computed: tuple[str, ...] = ()

    def investigated(self, before: Sequence[Step]) -> Investigation | None:
        """What replays of it show; ``before`` are the steps that its loss is to be compared with. The script waits.

        None where a signal has come meanwhile that the script handles itself: it is not kept waiting any longer.

        Raises:
            Exception: whatever the script's own code raises, or that there is no memory for it.
        """
        grew = self.watcher.optimizers.weights_grew
        with self._again() as (run, snapshot), contextlib.suppress(_SignalCameError):
            made = investigate(
                run, snapshot, self.why, self.scale, before=before, weights_grew=grew, observer=_UntilASignal()
            )
            return replace(made, replaced=self.played.replaced)
        return None

    def with_finite_data(self, names: Collection[str]) -> LoopStep:
        """The same step with numbers of the usual size in the place of inf and NaN in these of its data."""
        return replace(self, played=with_finite_data(self.played, names), computed=())

    def blamed_data(self) -> BadData:
        """What of its data explains that FP32 does not come through it: see :mod:`ampdbg.replay.step_data`.

        Raises:
            Exception: as ``investigated``.
        """
        with self._again() as (run, snapshot):
            return blamed_data(run, snapshot, self.played, self.computed)

    @contextlib.contextmanager
    def _again(self) -> Iterator[tuple[Run, Snapshot]]:
        """What it takes to run it again, while the script waits and sees nothing of that."""
        watcher = self.watcher
        run = run_of(self.played, self.model, tuple(watcher.optimizers), self.device, self.half)
        snapshot = snapshot_of(self.played, self.step, RandomState.now(), self.state)
        # The script may be within a region of autocast's.
        outside = torch.autocast(self.device.type, enabled=False)
        with watcher.paused(), held_signals(), _hushed(), torch.enable_grad(), outside:
            try:
                yield run, snapshot
            finally:
                watcher.left_by_replays |= snapshot.left

    def capture(
        self,
        captures: Captures,
        loss: float,
        scaler: torch.amp.GradScaler | None = None,
        *,
        is_broken_off: bool = False,
        stands_in: bool = False,
        is_wanted: bool = False,
    ) -> None:
        """Writes it. ``is_broken_off`` and ``stands_in`` as of :class:`Captured`. ``is_wanted``: it was asked for."""
        watcher, step = self.watcher, self.step

        def captured() -> Captured:
            return Captured(
                played=self.played,
                model=self.model,
                state=self.state,
                optimizers=tuple(watcher.optimizers),
                scaler=scaler,
                step=step,
                scale=self.scale,
                loss=loss,
                why=self.why,
                computed=self.computed,
                half=self.half,
                weights_grew=watcher.optimizers.weights_grew,
                scaler_number=0 if scaler is None else watcher.calls.number_of(scaler),
                record=watcher.record(),
                start=captures.start,
                is_broken_off=is_broken_off,
                stands_in=stands_in,
            )

        with watcher.paused(), held_signals(), torch.no_grad():
            captures.add(step, captured, is_wanted=is_wanted)


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
