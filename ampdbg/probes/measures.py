"""When a watcher looks at a step's gradients: before the loop alters them, and where a GPU is waited for anyway."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampdbg.probes.calls import Calls
from ampdbg.probes.open_step import Loop
from ampdbg.probes.optimizers import Optimizers
from ampdbg.probes.steps import StepLog
from ampdbg.probes.tensors import Scalar, is_on_device


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
            self._loop.now.trust(scaler, optimizer, may_change=may_change)
        self.take(optimizer, 1.0, may_change=may_change)

    def before_kernel(self, optimizer: Optimizer, divisor: Scalar) -> None:
        """To be called before a scaler steps an optimizer whose gradients it does not unscale, nor anybody alters."""
        if is_on_device(divisor) and not self._wants_norm:
            self._loop.now.trusted.add(id(optimizer))
        else:
            self.take(optimizer, divisor, may_change=False)

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """The last moment with gradients as the backward pass left them, where ``unscale_`` has not come before."""
        places = self._calls.owners(parameters)
        for optimizer in [one for one in self._optimizers if self._calls.place_of(one) in places]:
            scaler = self._calls.scaler_of(optimizer)
            if not self._loop.now.is_measured(optimizer):
                self.take(optimizer, 1.0 if scaler is None else self._loop.now.loss_scale())
                if not self._calls.is_unscaled(optimizer):
                    self._loop.now.early.add(id(optimizer))

    def take(self, optimizer: Optimizer, divisor: Scalar, *, may_change: bool = True) -> None:
        """Keeps what tells of the gradients as they are now, before the loop does anything to them."""
        if optimizer in self._optimizers:
            self._loop.now.measure(optimizer, divisor, self._optimizers.nonfinite_groups, may_change=may_change)

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
        """Brings what was measured to the host, and others, which it returns. On a GPU this syncs once."""
        return self._loop.now.read(optimizer, self._optimizers.nonfinite_groups, others)

    @property
    def _wants_norm(self) -> bool:
        return self._log.wants_norm(seldom=self._optimizers.device.type != "cpu")
