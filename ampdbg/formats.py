"""Number formats of mixed precision: the limits of float16, bfloat16 and float32 (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format, described as IEEE 754 does.

    ``name`` is torch's name, ``short`` the name in messages. ``precision`` counts significand bits with the implicit
    bit. ``min_exponent`` and ``max_exponent`` are the unbiased exponents of the smallest and largest normal number.
    """

    name: str
    short: str
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self) -> float:
        """The largest finite value: 65504 for float16."""
        return math.ldexp(2.0 - math.ldexp(1.0, 1 - self.precision), self.max_exponent)

    @property
    def overflow_threshold(self) -> float:
        """The smallest magnitude that rounds beyond ``largest``: half a unit above it, 65520 for float16."""
        return self.largest + math.ldexp(1.0, self.max_exponent - self.precision)

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

    def spacing_at(self, magnitude: float) -> float:
        """Return the distance between neighboring numbers at a normal ``magnitude``: 2 at 511 in bfloat16."""
        return math.ldexp(1.0, math.frexp(magnitude)[1] - self.precision)


FLOAT16 = FloatFormat("float16", "FP16", precision=11, min_exponent=-14, max_exponent=15)
BFLOAT16 = FloatFormat("bfloat16", "bfloat16", precision=8, min_exponent=-126, max_exponent=127)
FLOAT32 = FloatFormat("float32", "FP32", precision=24, min_exponent=-126, max_exponent=127)

FORMATS = {fmt.name: fmt for fmt in (FLOAT16, BFLOAT16, FLOAT32)}
HALF_NAMES = frozenset({FLOAT16.name, BFLOAT16.name})


def headroom_bits(magnitude: float, fmt: FloatFormat = FLOAT16) -> float:
    """Return how many doublings ``magnitude`` is away from overflow in ``fmt``.

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


LOWEST_EXPONENT = -64
"""The first exponent of histograms, which also counts smaller values: no loss scale in use can rescue them."""
HIGHEST_EXPONENT = 31
"""The last exponent of histograms, which also counts larger values."""


@dataclass(frozen=True)
class Exponents:
    """A histogram of exponents: ``counts[i]`` values lie in [2**(lowest + i), 2**(lowest + i + 1)).

    It does not count zeros, infinities and NaN. The counts are estimates if a tensor was sampled.
    """

    lowest: int = 0
    counts: tuple[int, ...] = ()

    def __add__(self, other: Exponents) -> Exponents:
        if not (self.counts and other.counts):
            return self if self.counts else other
        lowest = min(self.lowest, other.lowest)
        highest = max(self.lowest + len(self.counts), other.lowest + len(other.counts))
        counts = [0] * (highest - lowest)
        for part in (self, other):
            for position, count in enumerate(part.counts, start=part.lowest - lowest):
                counts[position] += count
        return Exponents(lowest, tuple(counts))


def scale_ceiling(magnitude: float, fmt: FloatFormat = FLOAT16) -> float:
    """Return the largest power of two by which ``magnitude`` can be multiplied without overflow in ``fmt``.

    Infinite for zero, 0 for inf and NaN. A loss scale changes by factors of two, so powers of two are enough.
    """
    if magnitude == 0.0:
        return math.inf
    if not math.isfinite(magnitude):
        return 0.0
    # magnitude = m * 2**e with m in [0.5, 1), and the threshold likewise: an exact comparison, without logarithms.
    mantissa, exponent = math.frexp(abs(magnitude))
    limit, highest = math.frexp(fmt.overflow_threshold)
    return math.ldexp(1.0, highest - exponent - (mantissa >= limit))


def scale_floor(exponents: Exponents, lost: float = 0.01, fmt: FloatFormat = FLOAT16) -> float:
    """Return the smallest power of two by which values must be multiplied so that ``fmt`` keeps their energy.

    Energy is the sum of squares; at most the share ``lost`` may be flushed to zero. Values of one exponent count alike.
    A value is kept if it lies above half the smallest subnormal. Return 0 without values.
    """
    energies = [count * math.ldexp(1.0, 2 * (exponents.lowest + i)) for i, count in enumerate(exponents.counts)]
    allowed = lost * math.fsum(energies)
    for position, energy in enumerate(energies):
        allowed -= energy
        if allowed < 0.0:
            _, kept_from = math.frexp(fmt.underflow_threshold)
            return math.ldexp(1.0, kept_from - 1 - (exponents.lowest + position))
    return 0.0
