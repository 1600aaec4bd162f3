"""Number formats of mixed precision: the limits of float16, bfloat16 and float32 (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format, described as IEEE 754 does.

    ``precision`` counts significand bits with the implicit one; ``min_exponent`` and ``max_exponent``
    are the unbiased exponents of the smallest and largest normal number.
    """

    name: str
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self) -> float:
        """The largest finite value: 65504 for float16."""
        return math.ldexp(2.0 - math.ldexp(1.0, 1 - self.precision), self.max_exponent)

    @property
    def overflow_threshold(self) -> float:
        """The smallest magnitude that rounds to infinity: half a unit above ``largest``, 65520 for float16."""
        return math.ldexp(2.0 - math.ldexp(1.0, -self.precision), self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """Below this magnitude precision is lost: 2**-14 for float16."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest magnitude above zero: 2**-24 for float16."""
        return math.ldexp(1.0, self.min_exponent - self.precision + 1)

    @property
    def underflow_threshold(self) -> float:
        """The largest magnitude that rounds to zero (a tie, to even): 2**-25 for float16."""
        return self.smallest_subnormal / 2


FLOAT16 = FloatFormat("float16", precision=11, min_exponent=-14, max_exponent=15)
BFLOAT16 = FloatFormat("bfloat16", precision=8, min_exponent=-126, max_exponent=127)
FLOAT32 = FloatFormat("float32", precision=24, min_exponent=-126, max_exponent=127)

FORMATS = {fmt.name: fmt for fmt in (FLOAT16, BFLOAT16, FLOAT32)}


def headroom_bits(magnitude: float, fmt: FloatFormat = FLOAT16) -> float:
    """How many doublings ``magnitude`` is away from overflow in ``fmt``.

    Zero at the threshold, negative beyond it, infinite for zero, minus infinite for inf, NaN for NaN.
    """
    if math.isnan(magnitude):
        return math.nan
    if magnitude == 0.0:
        return math.inf
    if math.isinf(magnitude):
        return -math.inf
    # math.log2 of the quotient would overflow to inf for a subnormal float64 divisor.
    return math.log2(fmt.overflow_threshold) - math.log2(abs(magnitude))
