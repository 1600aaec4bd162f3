"""Tests of how numbers, shares, durations and sizes are written and read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg import quantities


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf"), (0.123456, "0.1235")),
        *((3e-9, "3e-9"), (65504.0, "65,504"), (183251.7, "183,300"), (-7e4, "-70,000"), (1e12, "1e12")),
    ],
)
def test_numbers_have_four_digits_and_missing_and_nonfinite_values_have_names(value: float | None, text: str) -> None:
    assert quantities.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((65536.0, "65,536"), (1000.0, "1,000"), (1.0, "1"), (0.5, "0.5"), (0.125, "0.125"), (2.0**-4, "2^-4")),
        *((2.0**24, "2^24"), (0.3, "0.3"), (0.0, "0"), (-1.0, "-1"), (math.inf, "inf"), (math.nan, "NaN")),
    ],
)
def test_scales_are_short_decimals_or_powers_of_two(value: float, text: str) -> None:
    assert quantities.scale(value) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(1, 2, "50.0%"), (1, 10**6, "<0.1%"), (10**6 - 1, 10**6, "99.9%"), (3, 3, "100%"), (0, 0, "-"), (0, 9, "0%")],
)
def test_a_partial_share_is_never_rounded_to_zero_or_100_percent(part: int, whole: int, text: str) -> None:
    assert quantities.share(part, whole) == text


@pytest.mark.parametrize(("part", "text"), [(0, "0% of"), (50, "50.0% of"), (100, "100% of"), (217, "2.2 times")])
def test_a_part_larger_than_the_whole_is_written_as_a_multiple(part: int, text: str) -> None:
    assert quantities.multiple(part, 100) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0321, "32.1 ms"),
        (0.9999, "1.0 s"),
        (9.94, "9.9 s"),
        (12.3, "12 s"),
        (59.7, "1 min 0 s"),
        (200.0, "3 min 20 s"),
        (7500.0, "2 h 5 min"),
    ],
)
def test_the_precision_of_a_duration_depends_on_its_length(seconds: float, text: str) -> None:
    assert quantities.duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e8))
def test_no_duration_has_sixty_seconds_or_sixty_minutes(seconds: float) -> None:
    words = quantities.duration(seconds).split()
    assert all(
        float(value) < 60 for value, unit in zip(words[::2], words[1::2], strict=True) if unit not in ("h", "ms")
    )


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), ""),
        (("a",), "a"),
        (("a", "b"), "a and b"),
        (tuple("abcd"), "a, b, c and d"),
        (tuple("abcdef"), "a, b, c, d and 2 more"),
    ],
)
def test_a_list_shows_four_names_and_counts_the_rest(names: tuple[str, ...], text: str) -> None:
    assert quantities.listed(names) == text


def test_counted_nouns_are_singular_for_one_and_plural_otherwise() -> None:
    assert (quantities.counted(1, "step"), quantities.counted(0, "step")) == ("1 step", "0 steps")
    assert (quantities.counted(2, "batch"), quantities.counted(3000, "loss")) == ("2 batches", "3,000 losses")


def test_a_size_is_written_in_decimal_units() -> None:
    sizes = [quantities.byte_size(size) for size in (0, 999, 1200, 81_000, 2_500_000_000)]
    assert sizes == ["0 B", "999 B", "1.2 kB", "81 kB", "2.5 GB"]


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GiB", 16 * 2**30), ("800 MB", 800 * 10**6), ("1.5G", 1_500_000_000), ("4K", 4000), ("2TiB", 2**41)],
)
def test_a_size_is_read_with_its_unit(text: str, count: int) -> None:
    assert quantities.byte_count(text) == count


@given(st.text(max_size=12) | st.from_regex(r"[0-9]*\.?[0-9]{0,400} ?[kKMGTP]?i?B?", fullmatch=True))
def test_a_text_is_read_as_a_size_or_refused_with_the_allowed_form(text: str) -> None:
    try:
        outcome = str(quantities.byte_count(text))
    except ValueError as error:
        outcome = str(error)
    assert outcome.isdecimal() or "allowed: a number and its unit, such as 16GiB or 800MB" in outcome


@given(st.integers(0, 10**12 - 1), st.sampled_from(sorted(quantities.UNITS)))
def test_a_whole_size_is_read_exactly(number: int, unit: str) -> None:
    assert quantities.byte_count(f"{number}{unit}B") == number * quantities.UNITS[unit]


@pytest.mark.parametrize(
    ("part", "text"), [(0.0000141, "0.0014%"), (0.04, "4%"), (1.234, "120%"), (0.0, "0%"), (math.nan, "-")]
)
def test_a_percentage_keeps_two_digits(part: float, text: str) -> None:
    assert quantities.percent(part) == text
