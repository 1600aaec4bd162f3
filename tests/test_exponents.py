"""Tests of histograms of exponents and of the loss scales computed from them, against torch's own roundings."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.formats import Exponents, scale_ceiling, scale_floor

magnitudes = st.floats(2.0**-60, 2.0**60)
histograms = st.builds(Exponents, st.integers(-64, 0), st.lists(st.integers(0, 1000), max_size=31).map(tuple))


@given(magnitudes)
def test_the_scale_ceiling_is_the_last_power_of_two_that_does_not_overflow(magnitude: float) -> None:
    scale = scale_ceiling(magnitude)
    rounded = torch.tensor([magnitude * scale, magnitude * scale * 2], dtype=torch.float64).float().half()
    assert math.frexp(scale)[0] == 0.5
    assert [bool(torch.isinf(one)) for one in rounded] == [False, True]


def test_the_scale_ceiling_of_zero_nonfinite_values_and_values_at_the_threshold() -> None:
    assert scale_ceiling(0.0) == math.inf
    assert scale_ceiling(math.inf) == scale_ceiling(math.nan) == 0.0
    assert (scale_ceiling(65519.0), scale_ceiling(65520.0), scale_ceiling(1.0)) == (1.0, 0.5, 32768.0)


@given(st.lists(st.integers(-60, 0), min_size=1, max_size=200))
def test_the_scale_floor_is_the_first_power_of_two_that_keeps_99_percent_of_energy(exponents: list[int]) -> None:
    # A value in the middle of its bin is never a tie.
    values = torch.tensor([1.5 * 2.0**exponent for exponent in exponents], dtype=torch.float64)
    counts = tuple(exponents.count(exponent) for exponent in range(-60, 1))
    scale = scale_floor(Exponents(-60, counts))

    def kept(scale: float) -> float:
        survives = (values * scale).float().half() != 0
        return float(values[survives].square().sum() / values.square().sum())

    assert kept(scale) >= 0.99 > kept(scale / 2)


def test_an_empty_histogram_has_a_scale_floor_of_zero() -> None:
    assert scale_floor(Exponents()) == 0.0


@given(histograms, histograms)
def test_histograms_add_up_bin_by_bin(one: Exponents, other: Exponents) -> None:
    def at(histogram: Exponents, exponent: int) -> int:
        position = exponent - histogram.lowest
        return histogram.counts[position] if 0 <= position < len(histogram.counts) else 0

    both = one + other
    assert all(at(both, exponent) == at(one, exponent) + at(other, exponent) for exponent in range(-70, 40))
