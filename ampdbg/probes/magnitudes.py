"""What is kept of a tensor: its largest finite magnitude and how much of it is inf or NaN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ampdbg.probes.nonfinite import float_values


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The numbers of one tensor, or of several together.

    ``largest`` is the largest finite magnitude (0 for an empty tensor); ``inf`` and ``nan`` are element
    counts out of ``size``; ``dtype`` is torch's name without ``torch.``, empty when there was no float tensor.
    """

    largest: float = 0.0
    inf: int = 0
    nan: int = 0
    size: int = 0
    dtype: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether no element is infinite or NaN."""
        return self.inf == 0 and self.nan == 0


NOTHING = Magnitude()


def magnitude_of(tensor: torch.Tensor) -> Magnitude:
    """The magnitude of a tensor of any dtype and layout: one pass over memory when it is finite."""
    values = float_values(tensor)
    if values is None or values.numel() == 0:
        return NOTHING
    values = values.detach()
    dtype = str(tensor.dtype)[len("torch.") :]
    low, high = (end.item() for end in torch.aminmax(values))
    if low - low == 0.0 and high - high == 0.0:
        return Magnitude(max(abs(low), abs(high)), 0, 0, values.numel(), dtype)
    finite = torch.isfinite(values)
    nan = int(torch.count_nonzero(values != values))
    inf = values.numel() - int(torch.count_nonzero(finite)) - nan
    low, high = (end.item() for end in torch.aminmax(torch.where(finite, values, 0)))
    return Magnitude(max(abs(low), abs(high)), inf, nan, values.numel(), dtype)


def magnitude_of_number(number: float) -> Magnitude:
    """A plain number as a tensor of one element, of no dtype."""
    if number - number == 0.0:
        return Magnitude(largest=abs(float(number)), size=1)
    is_nan = number != number
    return Magnitude(inf=int(not is_nan), nan=int(is_nan), size=1)


def together(parts: Iterable[Magnitude]) -> Magnitude:
    """Several tensors seen as one; the dtype is that of the first."""
    largest, inf, nan, size, dtype = 0.0, 0, 0, 0, ""
    for part in parts:
        largest = max(largest, part.largest)
        inf, nan, size = inf + part.inf, nan + part.nan, size + part.size
        dtype = dtype or part.dtype
    return Magnitude(largest, inf, nan, size, dtype)
