"""Tests of number formats against torch's own limits and roundings, and of headroom in bits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, FloatFormat, headroom_bits

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def wider(fmt: FloatFormat) -> torch.dtype:
    """The dtype to round from: torch converts float64 to half through float32, which rounds twice."""
    return torch.float64 if fmt is FLOAT32 else torch.float32


def rounded(value: float, fmt: FloatFormat) -> float:
    return float(torch.tensor(value, dtype=wider(fmt)).to(getattr(torch, fmt.name)))


def next_to(value: float, towards: float, fmt: FloatFormat) -> float:
    ends = torch.tensor([value, towards], dtype=wider(fmt))
    return float(torch.nextafter(ends[0], ends[1]))


@each_format
def test_the_limits_of_a_format_are_those_of_torch(fmt: FloatFormat) -> None:
    info = torch.finfo(getattr(torch, fmt.name))
    assert fmt.largest == info.max
    assert fmt.smallest_normal == info.tiny
    assert fmt.smallest_subnormal == info.smallest_normal * info.eps


@each_format
def test_the_overflow_threshold_is_the_first_value_that_rounds_to_inf(fmt: FloatFormat) -> None:
    assert rounded(fmt.overflow_threshold, fmt) == math.inf
    assert rounded(next_to(fmt.overflow_threshold, 0.0, fmt), fmt) == fmt.largest


@each_format
def test_the_underflow_threshold_is_the_last_value_that_rounds_to_zero(fmt: FloatFormat) -> None:
    assert rounded(fmt.underflow_threshold, fmt) == 0.0
    assert rounded(next_to(fmt.underflow_threshold, 1.0, fmt), fmt) == fmt.smallest_subnormal


def test_float16_has_the_well_known_limits() -> None:
    assert (FLOAT16.largest, FLOAT16.overflow_threshold) == (65504.0, 65520.0)
    assert (FLOAT16.smallest_normal, FLOAT16.smallest_subnormal, FLOAT16.underflow_threshold) == (
        2**-14,
        2**-24,
        2**-25,
    )


def test_headroom_of_zero_infinity_nan_and_the_threshold() -> None:
    assert headroom_bits(0.0) == math.inf
    assert headroom_bits(math.inf) == headroom_bits(-math.inf) == -math.inf
    assert math.isnan(headroom_bits(math.nan))
    assert headroom_bits(65520.0) == 0.0


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_headroom_is_positive_exactly_below_the_threshold(value: float) -> None:
    assert (headroom_bits(value) > 0) == (value < FLOAT16.overflow_threshold)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_headroom_loses_a_bit_with_each_doubling_and_ignores_the_sign(value: float) -> None:
    for fmt in (FLOAT16, BFLOAT16, FLOAT32):
        assert headroom_bits(2 * value, fmt) == pytest.approx(headroom_bits(value, fmt) - 1)
        assert headroom_bits(-value, fmt) == headroom_bits(value, fmt)


def test_a_float8_format_can_be_described() -> None:
    fmt, info = FloatFormat("float8_e5m2", "FP8", 3, -14, 15), torch.finfo(torch.float8_e5m2)
    assert (fmt.largest, fmt.smallest_normal) == (info.max, info.tiny)
