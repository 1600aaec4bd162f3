"""The gradients between ``scale(loss).backward()`` and ``step()``: their norm, and when a watcher looks at them.

That is before the loop alters them, and where a GPU is waited for anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampdbg.probes.calls import Calls
from ampdbg.probes.open_step import Gradients, Loop, NormOfEach, OpenStep, is_finite_scalar
from ampdbg.probes.optimizers import Optimizers, Stepped
from ampdbg.probes.steps import StepLog
from ampdbg.probes.tensors import HALVES, Scalar, is_at_hand, is_on_device, to_host, total_norm
from ampdbg.record.run import GroupOverflow

NARROW = (*HALVES, torch.float32)
"""The dtypes whose norms torch takes of many tensors at once, in float32."""

SMALL = 32_768
"""On a CPU gradients up to this many elements are gathered into one buffer for the norm: one kernel for all of them
costs less than one each. Larger ones are read where they are, which costs less than copying them."""

_DOT, _CPU = torch.ops.aten.dot.default, DispatchKeySet(DispatchKey.CPU)
"""The CPU's own kernel at once: neither autograd nor the emulation of half products has to do with this."""


def gradient_norm(optimizer: Stepped, divisor: Scalar = 1.0) -> Scalar | None:
    """The 2-norm of all gradients of the optimizer divided by ``divisor``; of those on a GPU in float32, not synced.

    None when no parameter has a gradient. Inf or NaN when a gradient is not finite, and on a GPU also
    when the squares overflow float32; on a CPU a second look in float64 parts the two.
    """
    gradients = _gradients_of(optimizer)
    plain = _norm_of_plain(gradients)
    return _norm_of_any(gradients, divisor) if plain is None else plain / float(divisor)


@torch.no_grad()
def _norm_of_any(gradients: list[torch.Tensor], divisor: Scalar) -> Scalar | None:
    kinds = {(type(one), one.layout, one.dtype in NARROW, one.dtype, one.device) for one in gradients if one.numel()}
    if [kind[:3] for kind in kinds] == [(torch.Tensor, torch.strided, True)]:
        # With as few calls as can be: a GPU's loop has to wait for each.
        values = [one for one in gradients if one.numel()]
        norms = torch._foreach_norm(values, 2.0, torch.float32)
        norm: torch.Tensor | None = torch.linalg.vector_norm(torch.stack(norms))
    else:
        norm = total_norm(gradients)
    if norm is not None and is_at_hand(norm) and torch.isinf(norm):
        norm = total_norm(gradients, torch.float64)
    if norm is None:
        return None
    norm = norm / (divisor.to(norm.device) if isinstance(divisor, torch.Tensor) else divisor)
    return norm.item() if is_at_hand(norm) else norm


@torch.no_grad()
def gradient_norms(optimizer: torch.optim.Optimizer) -> NormOfEach | None:
    """The largest magnitude of each gradient of the optimizer, NaN where it holds one; not synced.

    None where they are not all dense on one device.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad.numel()]
    places = {(gradient.layout, gradient.is_floating_point(), gradient.device) for gradient in gradients}
    if [place[:-1] for place in places] != [(torch.strided, True)] or gradients[0].is_meta:
        return None
    norms = [norm if norm.dtype is torch.float32 else norm.float() for norm in torch._foreach_norm(gradients, math.inf)]
    return tuple((id(p), p.grad._version) for p in parameters if p.grad.numel()), torch.stack(norms)


def _gradients_of(optimizer: Stepped) -> list[torch.Tensor]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # thousands are not rare: a loop costs least
            gradient = parameter.grad
            if gradient is not None:
                found.append(gradient)
    return found


def _norm_of_plain(gradients: list[torch.Tensor]) -> float | None:
    """The norm of ordinary float32 gradients in main memory; None where some are not, or the sum overflows.

    Thousands of small gradients are not rare: what Python spends on each of them adds up to part of a step.
    """
    if not gradients or not is_at_hand(gradients[0]):
        return None
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    squares = 0.0
    try:
        for gradient in gradients:
            (small if gradient.numel() <= SMALL else large).append(gradient)
        parts = [torch._C._nn.flatten_dense_tensors(small), *large] if small else large
        for part in parts:
            is_plain = type(part) is torch.Tensor and part.layout is torch.strided and part.is_cpu
            if not is_plain or part.dtype is not torch.float32:
                return None
            flat = part.detach().reshape(-1)
            # On a CPU a dot product takes half the time of a norm, and Python adds a few numbers sooner than torch.
            squares += _DOT.redispatch(_CPU, flat, flat).item()
    except (RuntimeError, TypeError):  # sparse ones, or several devices
        return None
    return None if math.isinf(squares) else math.sqrt(squares)


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
        """Leaves it to a scaler that has unscaled the gradients to know whether they are finite.

        On a CPU its flags are there, and gradients that are not finite are to be measured. On a GPU to read them would
        cost a sync: where it withholds the step, the gradients are looked at then. Where they ``may_change`` before, as
        by clipping, their largest magnitudes are kept.
        """
        flags = scaler._found_inf_per_device(optimizer).values()
        are_read = all(map(is_at_hand, flags))
        if not are_read or (flags and not any(flag.item() for flag in flags)):
            each = gradient_norms(optimizer) if may_change and not are_read else None
            self._known(optimizer)[id(optimizer)] = Gradients(each=each)

    def before_kernel(self, optimizer: Optimizer, divisor: Scalar) -> None:
        """To be called before a scaler steps an optimizer whose gradients it does not unscale, nor anybody alters."""
        if not self._wants_norm:
            self._known(optimizer)[id(optimizer)] = Gradients()
        self.take(optimizer, divisor, may_change=False)

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """The last moment with gradients as the backward pass left them, where ``unscale_`` has not come before."""
        places = self._calls.owners(parameters)
        for optimizer in [one for one in self._optimizers if self._calls.place_of(one) in places]:
            scaled = self._calls.scaler_of(optimizer) is not None
            is_early = not self._calls.is_unscaled(optimizer)
            self.take(optimizer, self._step_of(optimizer).loss_scale() if scaled else 1.0, is_early=is_early)

    def take(self, optimizer: Optimizer, divisor: Scalar, *, may_change: bool = True, is_early: bool = False) -> None:
        """Keeps what tells of the gradients as they are now, before the loop does anything to them; unless that is
        known. Those on a GPU are not waited for: where they ``may_change`` before, the norm of each is kept."""
        is_to_be_looked_at = optimizer in self._optimizers and id(optimizer) not in self._known(optimizer)
        norm = gradient_norm(optimizer, divisor) if is_to_be_looked_at else None
        if isinstance(norm, torch.Tensor):
            each = gradient_norms(optimizer) if may_change else None
            self._known(optimizer)[id(optimizer)] = Gradients(norm, each, is_early=is_early)
        elif norm is not None:
            groups = self._groups(optimizer, norm)
            self._known(optimizer)[id(optimizer)] = Gradients(norm, groups=groups, is_early=is_early)

    def left(self, optimizer: Optimizer, wrote: Collection[int]) -> None:
        """To be called behind a backward pass whose step the loop itself may withhold, with the places of the
        optimizers whose gradients it ``wrote``. On a GPU this does not sync."""
        written = self._calls.written_for(optimizer)
        norm = gradient_norm(written) if self._calls.place_of(optimizer) in wrote else None
        if norm is not None:
            self._step_of(optimizer).left.append(norm)

    def are_finite(self, optimizer: Optimizer) -> bool:
        """The gradients of an optimizer are finite, as far as they were measured. On a GPU this syncs."""
        known = self._known(optimizer).get(id(optimizer))
        return known is None or is_finite_scalar(known.norm)

    def withheld(self, optimizer: Optimizer, divisor: Scalar) -> None:
        """To be called where a scaler has withheld a step: it has found what it was trusted to find."""
        known = self._known(optimizer).get(id(optimizer))
        if known is not None and known.norm is None:
            known.norm = gradient_norm(optimizer, divisor) if known.each is None else known.each[1].amax()

    def note_groups(self, optimizer: Optimizer) -> None:
        """Adds the groups whose gradients were not finite to the step."""
        known = self._known(optimizer).get(id(optimizer), Gradients())
        groups = self._optimizers.nonfinite_groups(optimizer, known.each) if known.groups is None else known.groups
        self._step_of(optimizer).groups += groups

    def steps_on_lost(self, optimizer: Optimizer) -> bool:
        """An optimizer whose step a scaler has just called is to step, though a loss is known to be lost.

        The scaler has waited for a GPU, which has nothing left to do: to read from it is free. Where a fused optimizer
        finds what is not finite, nobody has waited yet, and nobody does so here.
        """
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self.read(optimizer)
        is_to_step = found_inf is None or not (is_on_device(found_inf) or found_inf)
        return is_to_step and not self._step_of(optimizer).is_known_finite()

    def read(self, optimizer: Optimizer, others: Sequence[Scalar] = ()) -> list[float]:
        """Brings the losses to the host, the norm of an optimizer's gradients, and others, whose values it returns. On
        a GPU this syncs once."""
        step, known = self._step_of(optimizer), self._known(optimizer).get(id(optimizer), Gradients())
        norms = [] if known.norm is None else [known.norm]
        values = to_host([*norms, *step.scaled, *others])
        for known.norm in values[: len(norms)]:
            known.groups = (
                self._groups(optimizer, known.norm) if known.each is None and known.groups is None else known.groups
            )
        first, behind = len(norms), len(norms) + len(step.scaled)
        step.scaled, step.mark = list[Scalar](values[first:behind]), None
        return values[behind:]

    def _groups(self, optimizer: Optimizer, norm: float) -> tuple[GroupOverflow, ...] | None:
        """The groups that are not finite, where the norm is not."""
        return None if math.isfinite(norm) else self._optimizers.nonfinite_groups(optimizer)

    def _step_of(self, optimizer: Optimizer) -> OpenStep:
        return self._loop.step_of(self._calls.place_of(optimizer))

    def _known(self, optimizer: Optimizer) -> dict[int, Gradients]:
        return self._step_of(optimizer).gradients

    @property
    def _wants_norm(self) -> bool:
        return self._log.wants_norm(seldom=self._optimizers.device.type != "cpu")
