"""``ampdbg.watch``: watch any training loop from inside. With ``captures``, capture and replay its bad steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ampdbg.observer import UNOBSERVED
from ampdbg.precision.emulation import is_emulating
from ampdbg.probes import watch as steps
from ampdbg.probes.watch import Watch
from ampdbg.record.file import LARGEST_CAPTURE, MOST_CAPTURES
from ampdbg.record.run import Record, Step
from ampdbg.script.capture import Captures, asked_from_code
from ampdbg.script.failing_steps import FailingSteps
from ampdbg.script.launch import Script, start_of


class LoopWatch(Watch):
    """A watch that captures bad steps and replays them while the loop waits. Created by :func:`watch`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        on_step: Callable[[Step], None] | None,
        captures: Captures,
    ) -> None:
        super().__init__(model, optimizers, on_step)
        self._captures = captures
        self._failing = FailingSteps(self, captures, UNOBSERVED)
        self._entered = ExitStack()

    def start(self) -> Watch:
        """Start watching. From now on, ``ampdbg.capture()`` requests a capture from this watch."""
        self._entered.enter_context(asked_from_code(self._captures.ask))
        self._entered.enter_context(self._failing.recorder)
        return super().start()

    def stop(self) -> None:
        self._entered.close()
        super().stop()

    def record(self) -> Record:
        """Return the record so far, including replayed steps, not yet diagnosed."""
        return self._failing.seen(super().record())


def watch(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    on_step: Callable[[Step], None] | None = None,
    *,
    captures: str | Path | None = None,
) -> Watch:
    """Watch any training loop over these optimizers: its steps, and the order of its calls.

    Enter the watch as a context manager, or call ``start()`` and ``stop()``. Several watches may be active at once and
    end in any order. The optimizers that have gradients of the same losses share a step. A step ends with
    ``scaler.update()``, with the next loss, or when an optimizer steps on another loss. If no enabled scaler has scaled
    the loss, it also ends when every watched optimizer has stepped.

    Args:
        model: names the parameters. Its parameters and buffers are checked on unhealthy steps.
        optimizers: one or several. Steps of other optimizers are ignored.
        on_step: called with each Step as it ends. On a GPU this costs one sync per step.
        captures: a folder for bad steps. They are written there, and replayed in FP32 and at lower loss scales while
            the loop waits. ``ampdbg replay`` restarts the program of this process for a captured step.

    Raises:
        TypeError: an argument is not a model, an optimizer or a path.
    """
    plain = steps.watch(model, optimizers, on_step)
    if captures is None:
        return plain
    if not isinstance(captures, (str, Path)):
        raise TypeError(
            f"got a {type(captures).__name__} instead of the path of a folder; allowed: watch(model, optimizer, "
            "captures='captures')"
        )
    program = start_of(Script(sys.argv[0], tuple(sys.argv[1:])), emulate=is_emulating())
    kept = Captures(Path(captures), program, most=MOST_CAPTURES, largest=LARGEST_CAPTURE)
    return LoopWatch(model, tuple(plain.optimizers), on_step, kept)
