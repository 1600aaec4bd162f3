"""The gradients between ``scale(loss).backward()`` and ``step()``: their norm, and which groups are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.nn.utils import get_total_norm

from ampdbg.probes.tensors import Scalar, float_values, is_at_hand, magnitude_of
from ampdbg.record.run import GroupOverflow, ParameterCounts

SMALL = 32_768
"""On a CPU gradients up to this many elements are gathered into one buffer for the norm: one kernel for all of them
costs less than one each. Larger ones are read where they are, which costs less than copying them."""

_DOT, _CPU = torch.ops.aten.dot.default, DispatchKeySet(DispatchKey.CPU)
"""The CPU's own kernel at once: neither autograd nor the emulation of half products has to do with this."""

NormOfEach = tuple[tuple[tuple[int, int], ...], torch.Tensor]
"""The parameters by ``id`` with the version of each gradient, and their largest magnitudes: a vector on the device."""


@dataclass
class Look:
    """What the backward pass has left in the gradients of one optimizer.

    ``norm`` is theirs without the loss scale; None where a scaler tells whether they are finite, and nobody has asked
    for more. Where it is on a GPU still, ``each`` has the norm of each; where it is not finite ``groups`` are those.
    It ``is_early`` where the gradients still carried the scale.
    """

    norm: Scalar | None = None
    each: NormOfEach | None = None
    groups: tuple[GroupOverflow, ...] | None = None
    is_early: bool = False


def gradient_norm(optimizer: torch.optim.Optimizer, divisor: Scalar = 1.0) -> Scalar | None:
    """The 2-norm of all gradients of the optimizer divided by ``divisor``; of those on a GPU in float32, not synced.

    None when no parameter has a gradient. Inf or NaN when a gradient is not finite, and on a GPU also
    when the squares overflow float32; on a CPU that is told apart by a second look in float64.
    """
    gradients = _gradients_of(optimizer)
    plain = _norm_of_plain(gradients)
    return _norm_of_any(gradients, divisor) if plain is None else plain / float(divisor)


@torch.no_grad()
def _norm_of_any(gradients: list[torch.Tensor], divisor: Scalar) -> Scalar | None:
    kinds = {(type(one), one.dtype, one.layout, one.device) for one in gradients if one.numel()}
    if [kind[:-1] for kind in kinds] == [(torch.Tensor, torch.float32, torch.strided)]:
        # With as few calls as can be: a GPU's loop has to wait for each.
        values = [one for one in gradients if one.numel()]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    else:
        values = [value for value in map(float_values, gradients) if value is not None and value.numel()]
        values = [value.float() if value.dtype.itemsize < 4 else value for value in values]
        norm = get_total_norm(values)
    if not values:
        return None
    on_host = is_at_hand(norm)
    if on_host and torch.isinf(norm):
        norm = get_total_norm([value.double() for value in values]).float()
    norm = norm / (divisor.to(norm.device) if isinstance(divisor, torch.Tensor) else divisor)
    return norm.item() if on_host else norm


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


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
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


def nonfinite_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    first_index: int = 0,
    before: NormOfEach | None = None,
) -> tuple[GroupOverflow, ...]:
    """The parameter groups that hold inf or NaN in a gradient.

    Args:
        optimizer: its groups are looked at in order; a group's ``"name"`` key, where there is one, names it.
        names: qualified parameter names by ``id``.
        first_index: the index of the optimizer's first group, when several optimizers are watched.
        before: the :func:`gradient_norms` from before anything touched the gradients. Those that were not finite
            then count, whatever clipping has made of them; of a rewritten one it is known that so many elements at
            least were not finite.
    """
    pairs = () if before is None else zip(before[0], before[1].tolist(), strict=True)
    known: dict[int, tuple[int | None, float]] = {name: (version, norm) for (name, version), norm in pairs}
    may_spread = any(math.isnan(norm) for _, norm in known.values())
    found = []
    for index, group in enumerate(optimizer.param_groups, start=first_index):
        parameters = []
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                version, norm = known.get(id(parameter), (None, math.nan))
                inf, nan = _nonfinite_counts(parameter.grad, version, norm, may_spread)
                if inf or nan:
                    name = names.get(id(parameter), f"parameter {position}")
                    parameters.append(ParameterCounts(name, inf, nan, parameter.numel()))
        if parameters:
            found.append(GroupOverflow(index, group_name(group, index), tuple(parameters)))
    return tuple(found)


def _nonfinite_counts(gradient: torch.Tensor, version: int | None, norm: float, may_spread: bool) -> tuple[int, int]:
    """How many elements are infinite and NaN; of a gradient that was rewritten since, how many at least were."""
    if math.isfinite(norm):
        return 0, 0
    now = magnitude_of(gradient)
    if version is None or version == gradient._version:
        return now.inf, now.nan
    if math.isnan(norm):
        return 0, 1
    # Clipping by the norm makes NaN of inf and 0 of all else, unless a NaN was there: that spreads to all elements.
    return 1 if may_spread else max(1, now.inf + now.nan), 0


def group_name(group: Mapping[str, object], index: int) -> str:
    """What a parameter group is called: its ``"name"`` key, else its position."""
    return str(group.get("name") or f"group {index}")
