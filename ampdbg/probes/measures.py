"""When a watcher looks at a step's gradients: before the loop alters them, and where a GPU is waited for anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampdbg.probes.calls import Calls
from ampdbg.probes.gradients import Look, gradient_norm, gradient_norms
from ampdbg.probes.open_step import Loop, is_finite_scalar
from ampdbg.probes.optimizers import Optimizers
from ampdbg.probes.steps import StepLog
from ampdbg.probes.tensors import Scalar, is_at_hand, is_on_device, to_host
from ampdbg.record.run import GroupOverflow


class Measures:
    """What is kept of the gradients of the step that a loop has under way.

    Args:
        loop: has the step.
        optimizers: only their gradients are looked at.
        calls: know which of them a scaler has scaled or unscaled.
        log: knows whether the norm of the step is to be recorded.
    """

    def __init__(self, loop: Loop, optimizers: Optimizers, calls: Calls, log: StepLog) -> None:
        self._loop, self._optimizers, self._calls, self._log = loop, optimizers, calls, log

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """To be called when a scaler, enabled or not, has unscaled the gradients of an optimizer."""
        may_change = not self._loop.is_inside("step")
        if scaler.is_enabled() and not self._wants_norm:
            self._trust(scaler, optimizer, may_change=may_change)
        self.take(optimizer, 1.0, may_change=may_change)

    def _trust(self, scaler: GradScaler, optimizer: Optimizer, *, may_change: bool) -> None:
        """Leaves it to a scaler that has unscaled the gradients to tell whether they are finite.

        On a CPU it has told, and gradients that are not finite are to be measured. On a GPU its word would cost a sync
        now: where it withholds the step, they are looked at then. Where they ``may_change`` before, as by clipping,
        their largest magnitudes are kept.
        """
        flags = scaler._found_inf_per_device(optimizer).values()
        is_told = all(map(is_at_hand, flags))
        if not is_told or (flags and not any(flag.item() for flag in flags)):
            each = gradient_norms(optimizer) if may_change and not is_told else None
            self._looks[id(optimizer)] = Look(each=each)

    def before_kernel(self, optimizer: Optimizer, divisor: Scalar) -> None:
        """To be called before a scaler steps an optimizer whose gradients it does not unscale, nor anybody alters."""
        if not self._wants_norm:
            self._looks[id(optimizer)] = Look()
        self.take(optimizer, divisor, may_change=False)

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """The last moment with gradients as the backward pass left them, where ``unscale_`` has not come before."""
        places = self._calls.owners(parameters)
        for optimizer in [one for one in self._optimizers if self._calls.place_of(one) in places]:
            scaled = self._calls.scaler_of(optimizer) is not None
            is_early = not self._calls.is_unscaled(optimizer)
            self.take(optimizer, self._loop.now.loss_scale() if scaled else 1.0, is_early=is_early)

    def take(self, optimizer: Optimizer, divisor: Scalar, *, may_change: bool = True, is_early: bool = False) -> None:
        """Keeps what tells of the gradients as they are now, before the loop does anything to them; unless that is
        known. Those on a GPU are not waited for: where they ``may_change`` before they are, it tells of each."""
        is_to_be_looked_at = optimizer in self._optimizers and id(optimizer) not in self._looks
        norm = gradient_norm(optimizer, divisor) if is_to_be_looked_at else None
        if isinstance(norm, torch.Tensor):
            each = gradient_norms(optimizer) if may_change else None
            self._looks[id(optimizer)] = Look(norm, each, is_early=is_early)
        elif norm is not None:
            self._looks[id(optimizer)] = Look(norm, groups=self._groups(optimizer, norm), is_early=is_early)

    def are_finite(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of an optimizer are finite, as far as they were measured. On a GPU this syncs."""
        look = self._looks.get(id(optimizer))
        return look is None or is_finite_scalar(look.norm)

    def withheld(self, optimizer: Optimizer, divisor: Scalar) -> None:
        """To be called where a scaler has withheld a step: it has found what it was trusted to find."""
        look = self._looks.get(id(optimizer))
        if look is not None and look.norm is None:
            look.norm = gradient_norm(optimizer, divisor) if look.each is None else look.each[1].amax()

    def note_groups(self, optimizer: Optimizer) -> None:
        """Adds the groups whose gradients were not finite to the step."""
        look = self._looks.get(id(optimizer), Look())
        groups = self._optimizers.nonfinite_groups(optimizer, look.each) if look.groups is None else look.groups
        self._loop.now.groups += groups

    def steps_on_lost(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer whose step a scaler has just called is to step, though a loss is known to be lost.

        The scaler has waited for a GPU, which has nothing left to do: to read from it is free. Where a fused optimizer
        finds what is not finite, nobody has waited yet, and nobody does so here.
        """
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self.read(optimizer)
        is_to_step = found_inf is None or not (is_on_device(found_inf) or found_inf)
        return is_to_step and not self._loop.now.is_known_finite()

    def read(self, optimizer: Optimizer, others: Sequence[Scalar] = ()) -> list[float]:
        """Brings the losses to the host, the norm of an optimizer's gradients, and others, whose values it returns. On
        a GPU this syncs once."""
        step, look = self._loop.now, self._looks.get(id(optimizer), Look())
        norms = [] if look.norm is None else [look.norm]
        values = to_host([*norms, *step.scaled, *others])
        for look.norm in values[: len(norms)]:
            look.groups = (
                self._groups(optimizer, look.norm) if look.each is None and look.groups is None else look.groups
            )
        first, behind = len(norms), len(norms) + len(step.scaled)
        step.scaled, step.mark = list[Scalar](values[first:behind]), None
        return values[behind:]

    def _groups(self, optimizer: Optimizer, norm: float) -> tuple[GroupOverflow, ...] | None:
        """The groups that are not finite, where the norm is not."""
        return None if math.isfinite(norm) else self._optimizers.nonfinite_groups(optimizer)

    @property
    def _looks(self) -> dict[int, Look]:
        return self._loop.now.looks

    @property
    def _wants_norm(self) -> bool:
        return self._log.wants_norm(seldom=self._optimizers.device.type != "cpu")
