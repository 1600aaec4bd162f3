"""How far apart half tensors are, counted in units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor


def units_apart(left: Tensor, right: Tensor) -> Tensor:
    """For each pair of float16 elements, how many representable numbers lie between them (int32).

    Infinity follows 65504, both zeros are one number, two NaNs are 0 apart.
    """
    assert left.dtype is right.dtype is torch.float16
    assert left.shape == right.shape
    distance = (_ordered(left) - _ordered(right)).abs()
    return distance.masked_fill(left.isnan() & right.isnan(), 0)


NOISE = 2.0**-20
"""Where a sum in FP32 cancels, what is left of it is a few roundings of its terms; which, depends on the machine."""


def share_close(left: Tensor, right: Tensor, units: int = 1) -> float:
    """The share of elements that are equal to within so many units in the last place, or cancelled in both."""
    finite = right.float().where(right.isfinite(), torch.zeros(()))
    noise = NOISE * float(finite.abs().max()) if finite.numel() else 0.0
    cancelled = (left.float().abs() <= noise) & (right.float().abs() <= noise)
    return float(((units_apart(left, right) <= units) | cancelled).float().mean())


def same_overflow(left: Tensor, right: Tensor) -> bool:
    """Whether the same elements are infinite and the same are NaN.

    A sum just at the threshold may round either way: 65504 and inf, one unit apart, count as the same.
    """
    differ = left.isinf() != right.isinf()
    return bool((units_apart(left, right)[differ] <= 1).all()) and torch.equal(left.isnan(), right.isnan())


def _ordered(tensor: Tensor) -> Tensor:
    """Integers in the order of the numbers: a float's bits are its magnitude's rank, behind a sign bit."""
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
