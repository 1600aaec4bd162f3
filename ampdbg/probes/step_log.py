"""The steps that have ended: read from the device in bulk, completed where they are unhealthy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ampdbg.record.run import Step, TensorCounts

from .nonfinite import nonfinite_in_model
from .open_step import OpenStep, to_host
from .overflow_tally import OverflowTally

UNREAD_STEPS = 64
"""On a GPU so many healthy steps are kept as device scalars before one sync reads them all."""


class StepLog:
    """The steps of one loop. ``batch`` collects the non-finite leaves of the batches of the step under way.

    Args:
        model: its parameters and buffers are checked on unhealthy steps.
        groups: how many parameter groups there are, over all optimizers.
        on_step: called with each Step as it ends.
    """

    def __init__(self, model: torch.nn.Module, groups: int, on_step: Callable[[Step], None] | None) -> None:
        self.batch: list[TensorCounts] = list(nonfinite_in_model(model))
        self.tally = OverflowTally()
        self._model = model
        self._known_bad = {counts.name for counts in self.batch}
        self._groups = groups
        self._on_step = on_step
        self._losses: dict[str, torch.Tensor] = {}
        self._unread: list[OpenStep] = []
        self._steps: list[Step] = []

    @property
    def steps(self) -> tuple[Step, ...]:
        """One for each step that has ended; on a GPU this reads what is still unread (one sync)."""
        self._read()
        return tuple(self._steps)

    def closed(self) -> int:
        """How many steps have ended, read or not."""
        return len(self._steps) + len(self._unread)

    def add_losses(self, losses: Mapping[str, torch.Tensor], weight: float) -> None:
        """Adds unscaled losses, scalar tensors by name, to the step under way."""
        for name, loss in losses.items():
            part = loss.detach().float() * weight
            self._losses[name] = self._losses[name] + part if name in self._losses else part

    def close(self, step: OpenStep) -> None:
        """Ends a step."""
        if step.scale is None:
            step.note_scale()
        step.losses, self._losses = self._losses, {}
        step.nonfinite, self.batch = self.batch, []
        self._unread.append(step)
        on_cpu = all(tensor.device.type == "cpu" for tensor in step.scalars())
        if step.skipped or on_cpu or self._on_step is not None or len(self._unread) >= UNREAD_STEPS:
            self._read()

    def finish(self) -> None:
        """Looks once more at parameters and buffers: a buffer can be poisoned while every loss is finite."""
        self._read()
        if self._steps:
            self._steps[-1] = self._with_bad_tensors(self._steps[-1])

    def _read(self) -> None:
        """Turns the unread steps into Steps, with one transfer for all of them."""
        unread, self._unread = self._unread, []
        values = iter(to_host([scalar for step in unread for scalar in step.scalars()]))
        for step in unread:
            made = step.to_step(len(self._steps), values)
            if made.skipped or not _is_finite_number(made.loss):
                made = self._with_bad_tensors(made)
            if made.groups:
                listed, hit = self.tally.kept(made.step, made.groups, step.reachable, self._groups)
                made = replace(made, groups=listed, groups_hit=hit)
            self._steps.append(made)
            if self._on_step is not None:
                self._on_step(made)

    def _with_bad_tensors(self, step: Step) -> Step:
        """Adds the parameters and buffers that are not finite: each once, at the first step that shows it."""
        found = nonfinite_in_model(self._model, "after", but=self._known_bad)
        self._known_bad |= {counts.name for counts in found}
        return replace(step, nonfinite=(*step.nonfinite, *found))


def _is_finite_number(value: float) -> bool:
    return value - value == 0.0
