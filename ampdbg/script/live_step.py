"""The current step of a watched loop, replayed and captured while the model still has the weights of that step."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.agreement import is_finite
from ampdbg.observer import Observer
from ampdbg.ops import COLLECTIVES
from ampdbg.probes.watch import Watch
from ampdbg.record.run import Investigation
from ampdbg.replay.investigation import StepFacts, blamed_data
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot
from ampdbg.replay.step import NotReplayableError, RecordedStep
from ampdbg.script.ranks import is_in_group
from ampdbg.script.signals import have_come, held_signals


@dataclass(frozen=True)
class LiveStep:
    """The current step of a watched loop, with its weights.

    Args:
        facts: what is known of the step.
        watcher: the watch of the loop. It is paused during replays.
        recorded: the recorded calls of the step.
        why_no_further: the reason why only its modules are replayed.
        rewritten: as in an Investigation.
    """

    facts: StepFacts
    watcher: Watch
    recorded: RecordedStep
    why_no_further: str = ""
    rewritten: Mapping[str, float] = field(default_factory=dict)

    def investigated(self) -> Investigation:
        """Replay the step while the script waits, and return the investigation.

        Raises:
            NotReplayableError: a signal arrived that the script handles itself, so the script must not wait longer.
            Exception: any error of the script's own code, or out of memory.
        """
        with self._again() as (run, snapshot):
            made = self.facts.investigated(run, snapshot, self.watcher.steps, _UntilASignal())
            if made.reproduced and not is_finite(made.fp32):
                self.watcher.log.batch += blamed_data(run, snapshot, self.recorded)
        return replace(made, rewritten=self.rewritten, why_no_further=self.why_no_further)

    @contextlib.contextmanager
    def _again(self) -> Iterator[tuple[Run, Snapshot]]:
        """Prepare a replay that the script cannot notice, and yield its run and snapshot."""
        clip_grad_norm = self.watcher.calls.clip_grad_norm
        optimizers = self.watcher.optimizers.stepping_with(self.facts.optimizer, self.watcher.steps)
        run = self.recorded.run(optimizers, self.facts.half, clip_grad_norm)
        snapshot = self.recorded.snapshot(self.facts.step, RandomState.now())
        # The script may be inside an autocast region.
        outside = torch.autocast(run.device.type, enabled=False)
        apart = _NoCollectives() if is_in_group() else contextlib.nullcontext()
        with (
            self.watcher.paused(),
            held_signals(),
            contextlib.redirect_stdout(_OutputOfOtherThreads(sys.stdout)),  # the step has already printed it
            contextlib.redirect_stderr(_OutputOfOtherThreads(sys.stderr)),
            torch.enable_grad(),
            outside,
            apart,
        ):
            try:
                yield run, snapshot
            finally:
                self.watcher.left_by_replays |= snapshot.left
        torch.clear_autocast_cache()  # inside the script's autocast region, it may hold casts of altered weights


class _NoCollectives(TorchDispatchMode):
    """Rejects ops that wait for other processes, because those do not replay the step."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in COLLECTIVES:
            raise RuntimeError(f"it waits for other processes, in {op}")
        return op(*args, **(kwargs or {}))


class _UntilASignal(Observer):
    """Stops between two replays: a batch system gives a script half a minute to save its model."""

    def replay(self, step: int, doing: str) -> None:
        """Check for signals before the next replay.

        Raises:
            NotReplayableError: a signal is waiting. The end of the script needs no note on the step.
        """
        if have_come():
            raise NotReplayableError


class _OutputOfOtherThreads(io.TextIOBase):
    """A stream that forwards only the output of other threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text, unless this thread called."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        """Flush the wrapped stream."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
