"""The steps that have ended: read from the device in bulk, completed where they are unhealthy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ampdbg.record.run import Step, TensorCounts

from .nonfinite import nonfinite_in_model
from .open_step import OpenStep, to_host

UNREAD_STEPS = 64
"""On a GPU so many healthy steps are kept as device scalars before one sync reads them all."""

LISTED_STEPS = 50
"""So many unhealthy steps list their groups; later ones only count them, so that the record stays small."""

LISTED_PARAMETERS = 10_000
"""So many parameters are listed over all steps, about 2 MB of JSON; the first unhealthy step lists all of its own."""


class StepLog:
    """The steps of one loop. ``batch`` collects the non-finite leaves of the batches of the step under way.

    Args:
        model: its parameters and buffers are checked on unhealthy steps.
        on_step: called with each Step as it ends.
    """

    def __init__(self, model: torch.nn.Module, on_step: Callable[[Step], None] | None) -> None:
        self.batch: list[TensorCounts] = list(nonfinite_in_model(model))
        self._model = model
        self._known_bad = {counts.name for counts in self.batch}
        self._listed_steps = 0
        self._listed_parameters = 0
        self._on_step = on_step
        self._losses: dict[str, torch.Tensor] = {}
        self._unread: list[OpenStep] = []
        self._steps: list[Step] = []

    @property
    def steps(self) -> tuple[Step, ...]:
        """One for each step that has ended; on a GPU this reads what is still unread (one sync)."""
        self._read()
        return tuple(self._steps)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the steps leave out."""
        unlisted = sum(step.groups_hit > 0 for step in self._steps)
        if not unlisted:
            return ()
        every = self._listed_steps + unlisted
        return (f"only {self._listed_steps} of {every} steps with non-finite gradients list their groups",)

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
            made = self._with_few_groups(made)
            self._steps.append(made)
            if self._on_step is not None:
                self._on_step(made)

    def _with_few_groups(self, step: Step) -> Step:
        """The step with its groups; only with their count once the record lists enough."""
        size = self._listed_parameters + sum(len(group.parameters) for group in step.groups)
        is_full = self._listed_steps >= LISTED_STEPS or size > LISTED_PARAMETERS
        if self._listed_steps and is_full:
            return replace(step, groups=(), groups_hit=len(step.groups))
        if step.groups:
            self._listed_steps, self._listed_parameters = self._listed_steps + 1, size
        return step

    def _with_bad_tensors(self, step: Step) -> Step:
        """Adds the parameters and buffers that are not finite: each once, at the first step that shows it."""
        found = nonfinite_in_model(self._model, "after", but=self._known_bad)
        self._known_bad |= {counts.name for counts in found}
        return replace(step, nonfinite=(*step.nonfinite, *found))


def _is_finite_number(value: float) -> bool:
    return value - value == 0.0
