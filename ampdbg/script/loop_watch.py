"""``ampdbg.watch``: any training loop, watched from within; with captures its bad steps are written and run again."""

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
    """A watch that captures steps that go wrong, and runs them again while the loop waits; made by :func:`watch`."""

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
        """As of any watch; ``ampdbg.capture()`` asks it for a capture from now on."""
        self._entered.enter_context(asked_from_code(self._captures.ask))
        self._entered.enter_context(self._failing.recorder)
        return super().start()

    def stop(self) -> None:
        """As of any watch."""
        self._entered.close()
        super().stop()

    def record(self) -> Record:
        """What was seen so far, the steps that were run again included; not yet diagnosed."""
        return self._failing.seen(super().record())


def watch(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    on_step: Callable[[Step], None] | None = None,
    *,
    captures: str | Path | None = None,
) -> Watch:
    """Watches any training loop over these optimizers: its steps, and the order of its calls.

    To be entered as a context manager, or between ``start()`` and ``stop()``. Several may watch at once, and end in any
    order. A step is that of the optimizers whose gradients are of the same losses. It ends with ``scaler.update()``,
    with the next loss, or when an optimizer steps on another one; where no enabled scaler has scaled the loss also when
    every watched optimizer has stepped.

    Args:
        model: names the parameters; its parameters and buffers are checked on unhealthy steps.
        optimizers: one or several; steps of others are left alone.
        on_step: called with each Step as it ends. On a GPU this costs one sync a step.
        captures: a folder. A step that goes wrong is written there, and run again in FP32 and at lower loss scales
            while the loop waits. ``ampdbg replay`` starts the
            program of this process again for it.

    Raises:
        TypeError: these are no model, no optimizers, no path.
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
