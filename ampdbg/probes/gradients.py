"""Measures gradients between ``scale(loss).backward()`` and ``step()``, before the loop alters them.

On a GPU the results are read only where the loop waits for the GPU anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampdbg.probes.calls import Calls
from ampdbg.probes.open_step import Gradients, Loop, NormOfEach, OpenStep, is_finite_if_read, is_finite_scalar
from ampdbg.probes.optimizers import Optimizers, Stepped, stepped_by
from ampdbg.probes.steps import StepLog
from ampdbg.probes.tensors import HALVES, Scalar, is_at_hand, is_on_device, to_host, total_norm
from ampdbg.record.run import GroupOverflow

NARROW = (*HALVES, torch.float32)
"""The dtypes for which torch computes the norms of many tensors in one call, in float32."""

SMALL = 32_768
"""On a CPU, gradients of at most this many elements are copied into one buffer for the norm. One kernel for all costs
less than one kernel each. Larger gradients are read in place, which costs less than a copy."""

_DOT, _CPU = torch.ops.aten.dot.default, DispatchKeySet(DispatchKey.CPU)
"""Calls the CPU kernel directly, past autograd and past the emulation of half products."""


def gradient_norm(optimizer: Stepped, divisor: Scalar = 1.0) -> Scalar | None:
    """Return the 2-norm of all gradients of the optimizer, divided by ``divisor``; on a GPU in float32, not synced.

    None if no parameter has a gradient. Inf or NaN if a gradient is not finite, and on a GPU also if the squares
    overflow float32. On a CPU a second pass in float64 separates the two cases.
    """
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # up to thousands: a plain loop is fastest
            gradient = parameter.grad
            if gradient is not None:
                gradients.append(gradient)
    plain = _norm_of_plain(gradients)
    return _norm_of_any(gradients, divisor) if plain is None else plain / float(divisor)


@torch.no_grad()
def _norm_of_any(gradients: list[torch.Tensor], divisor: Scalar) -> Scalar | None:
    kinds = {(type(one), one.layout, one.dtype in NARROW, one.dtype, one.device) for one in gradients if one.numel()}
    if [kind[:3] for kind in kinds] == [(torch.Tensor, torch.strided, True)]:
        # As few calls as possible: on a GPU each call costs the loop time.
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
    """Return the largest magnitude of each gradient of the optimizer, NaN if the gradient holds NaN; not synced.

    None unless all gradients are dense and on one device.
    """
    parameters: list[Any] = [one for one in stepped_by(optimizer) if one.grad is not None and one.grad.numel()]
    gradients = [one.grad for one in parameters]
    places = {(gradient.layout, gradient.is_floating_point(), gradient.device) for gradient in gradients}
    if [place[:-1] for place in places] != [(torch.strided, True)] or gradients[0].is_meta:
        return None
    norms = [norm if norm.dtype is torch.float32 else norm.float() for norm in torch._foreach_norm(gradients, math.inf)]
    return tuple((id(one), one.grad._version) for one in parameters), torch.stack(norms)


def _norm_of_plain(gradients: list[torch.Tensor]) -> float | None:
    """Return the norm of plain float32 gradients in main memory; None for other gradients or if the sum overflows.

    Models may have thousands of small gradients, and Python's time for each adds up to a part of the step.
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
            # On a CPU a dot product takes half the time of a norm. Python adds a few numbers faster than torch.
            squares += _DOT.redispatch(_CPU, flat, flat).item()
    except (RuntimeError, TypeError):  # sparse gradients, or several devices
        return None
    return None if math.isinf(squares) else math.sqrt(squares)


class Measures:
    """Measures and keeps the gradients of a loop's open steps.

    Args:
        loop: holds the open steps.
        optimizers: the optimizers to measure.
        calls: know which gradients a scaler has scaled or unscaled.
        log: knows whether to record the norm of the step.
    """

    def __init__(self, loop: Loop, optimizers: Optimizers, calls: Calls, log: StepLog) -> None:
        self._loop, self._optimizers, self._calls, self._log = loop, optimizers, calls, log

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Measure an optimizer's gradients after a scaler, enabled or not, has unscaled them."""
        may_change = not self._loop.is_inside_a_scaler_step
        if scaler.is_enabled() and not self._wants_norm:
            self._trust(scaler, optimizer, may_change=may_change)
        self.take(optimizer, 1.0, may_change=may_change)

    def _trust(self, scaler: GradScaler, optimizer: Optimizer, *, may_change: bool) -> None:
        """Skip the measurement if the scaler's own check for inf and NaN is enough.

        On a CPU its flags can be read, so only finite gradients are skipped. On a GPU reading them would sync, so the
        gradients are measured when the scaler withholds the step. If they ``may_change`` before, as by clipping, their
        largest magnitudes are kept.
        """
        flags = scaler._found_inf_per_device(optimizer).values()
        are_read = all(map(is_at_hand, flags))
        if not are_read or (flags and not any(flag.item() for flag in flags)):
            self._keep(optimizer, Gradients(each=gradient_norms(optimizer) if may_change and not are_read else None))

    def before_kernel(self, optimizer: Optimizer, divisor: Scalar) -> None:
        """Measure gradients before a step whose kernel unscales them, as of a fused optimizer."""
        if not self._wants_norm:
            self._keep(optimizer, Gradients())
        self.take(optimizer, divisor, may_change=False)

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """Measure gradients before clipping changes them, unless ``unscale_`` has measured them already."""
        places = self._calls.owners(parameters)
        for optimizer in [one for one in self._optimizers if self._calls.place_of(one) in places]:
            scaled = self._calls.scaler_of(optimizer) is not None
            is_early = not self._calls.is_unscaled(optimizer)
            self.take(optimizer, self._step_of(optimizer).loss_scale() if scaled else 1.0, is_early=is_early)

    def take(self, optimizer: Optimizer, divisor: Scalar, *, may_change: bool = True, is_early: bool = False) -> None:
        """Measure the current gradients, unless this step has done so. On a GPU this does not sync: if they
        ``may_change`` before the norm is read, the largest magnitude of each is kept."""
        is_new = optimizer in self._optimizers and id(optimizer) not in self._step_of(optimizer).gradients
        norm = gradient_norm(optimizer, divisor) if is_new else None
        if isinstance(norm, torch.Tensor):
            each = gradient_norms(optimizer) if may_change else None
            self._keep(optimizer, Gradients(norm, each, is_early=is_early))
        elif norm is not None:
            self._keep(optimizer, Gradients(norm, groups=self._groups(optimizer, norm), is_early=is_early))

    def after_backward(
        self, optimizer: Optimizer, wrote: Collection[int], returned: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Measure gradients after a backward pass, if the loop itself may withhold the step or repair them. ``wrote``
        holds the places of the optimizers with gradients that the pass wrote. ``returned`` are gradients that it has
        given to the loop instead. On a GPU this does not sync."""
        if self._calls.place_of(optimizer) not in wrote:
            return
        written = self._calls.written_for(optimizer)
        norm = gradient_norm(written) if returned is None else _norm_of_any([*filter(torch.is_tensor, returned)], 1.0)
        if norm is not None:
            self._step_of(optimizer).left_norms.setdefault(id(optimizer), []).append(norm)

    def are_repaired(self, optimizer: Optimizer) -> bool:
        """True if gradients are finite, and a backward pass has left others. Norms on a GPU do not count until
        :meth:`read` has read them."""
        step = self._step_of(optimizer)
        is_of_kernel = getattr(optimizer, "found_inf", None) is not None  # which may yet skip the step
        left = () if is_of_kernel else step.left_norms.get(id(optimizer), ())
        is_repaired = not all(map(is_finite_if_read, left)) and self.are_finite(optimizer)
        step.repaired |= is_repaired
        return is_repaired

    def are_finite(self, optimizer: Optimizer) -> bool:
        """True unless measured gradients of the optimizer are not finite. On a GPU this syncs."""
        return is_finite_scalar(self._known(optimizer).norm)

    def after_withheld_step(self, optimizer: Optimizer, divisor: Scalar) -> None:
        """Measure gradients after a scaler withheld the step, if its own check had replaced the measurement."""
        known = self._known(optimizer)
        if known.norm is None:
            known.norm = gradient_norm(optimizer, divisor) if known.each is None else known.each[1].amax()

    def note_groups(self, optimizer: Optimizer) -> None:
        """Add the parameter groups with non-finite gradients to the step."""
        known = self._known(optimizer)
        groups = self._optimizers.nonfinite_groups(optimizer, known.each) if known.groups is None else known.groups
        self._step_of(optimizer).groups += groups

    def steps_despite_nonfinite_loss(self, optimizer: Optimizer) -> bool:
        """True if the scaler lets the optimizer step although a loss is known to be inf or NaN.

        The scaler has already waited for the GPU, so reading the losses is free. A fused optimizer checks for inf
        itself, and nothing has waited yet: then this method does not sync either.
        """
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self.read(optimizer)
        is_to_step = found_inf is None or not (is_on_device(found_inf) or found_inf)
        return is_to_step and not self._step_of(optimizer).is_known_finite()

    def read(self, optimizer: Optimizer, others: Sequence[Scalar] = ()) -> list[float]:
        """Copy the losses, the norms of the optimizer's gradients and ``others`` to the host. Return the values of
        ``others``. On a GPU this syncs once."""
        step, known = self._step_of(optimizer), self._known(optimizer)
        left, norms = step.left_norms.get(id(optimizer), []), [] if known.norm is None else [known.norm]
        values = iter(to_host([*step.backward_losses, *left, *norms, *others]))
        step.backward_losses, step.mark = list(islice(values, len(step.backward_losses))), None
        left[:] = islice(values, len(left))
        for norm in islice(values, len(norms)):
            known.norm = norm
            if known.each is None and known.groups is None:
                known.groups = self._groups(optimizer, norm)
        return list(values)

    def _groups(self, optimizer: Optimizer, norm: float) -> tuple[GroupOverflow, ...] | None:
        """Return the groups with non-finite gradients; None if the norm is finite."""
        return None if math.isfinite(norm) else self._optimizers.nonfinite_groups(optimizer)

    def _step_of(self, optimizer: Optimizer) -> OpenStep:
        return self._loop.step_of(self._calls.place_of(optimizer))

    def _known(self, optimizer: Optimizer) -> Gradients:
        """Return the measured gradients of the optimizer's open step; without a norm if there are none."""
        return self._step_of(optimizer).gradients.get(id(optimizer), Gradients())

    def _keep(self, optimizer: Optimizer, gradients: Gradients) -> None:
        self._step_of(optimizer).gradients[id(optimizer)] = gradients

    @property
    def _wants_norm(self) -> bool:
        return self._log.wants_norm(seldom=self._optimizers.device.type != "cpu")
