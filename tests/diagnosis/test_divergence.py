"""When a loss has risen and when FP32 diverges, for losses of any sign, level and size."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.diagnosis.losses import FEW_LOSSES, climbs_on, may_have_risen, risen, rose

# Whole numbers, so that adding a constant does not round.
losses = st.lists(st.integers(-1000, 1000).map(float), max_size=12)
many_losses = st.lists(st.integers(-1000, 1000).map(float), min_size=FEW_LOSSES, max_size=12)
constants = st.integers(-1000, 1000).map(float)
factors = st.sampled_from([2.0**power for power in (-20, -3, 1, 20)])


def moved(values: Sequence[float], constant: float, factor: float) -> list[float]:
    return [(value + constant) * factor for value in values]


@given(losses, constants, factors)
def test_adding_a_constant_or_scaling_does_not_change_whether_losses_rose(
    values: list[float], constant: float, factor: float
) -> None:
    assert rose(values) == rose(moved(values, constant, factor))
    assert may_have_risen(values, 0.0) == may_have_risen(moved(values, constant, factor), constant * factor)


@given(many_losses, losses, constants, factors)
def test_adding_a_constant_or_scaling_does_not_change_whether_fp32_diverges(
    before: list[float], continuation: list[float], constant: float, factor: float
) -> None:
    same = climbs_on(moved(before, constant, factor), moved(continuation, constant, factor))
    assert climbs_on(before, continuation) == same


@given(st.lists(constants, min_size=1, max_size=5), st.integers(2, 5), losses)
def test_losses_that_repeat_in_a_cycle_never_rise(cycle: list[float], turns: int, before: list[float]) -> None:
    assert not rose(cycle * turns, times=0.0)
    assert not climbs_on(before, cycle * turns)


@given(many_losses, losses)
def test_a_continuation_that_ends_at_or_below_its_start_does_not_climb(
    before: list[float], continuation: list[float]
) -> None:
    if continuation and continuation[-1] <= continuation[0]:
        assert not climbs_on(before, continuation)


@pytest.mark.parametrize("growth", [1.1, 1.5, 4.0, 1e6])
@pytest.mark.parametrize("shape", [lambda loss: loss, lambda loss: loss - 5.0, lambda loss: 1e-3 * loss - 2.0])
def test_a_loss_that_grows_by_a_constant_factor_diverges(growth: float, shape: Callable[[float], float]) -> None:
    series = [shape(growth**step) for step in range(20)]
    assert climbs_on(series[:10], series[10:])
    assert not climbs_on(series[:10], series[10:][::-1])


def test_losses_that_end_in_inf_or_nan_diverge_only_if_well_above_the_earlier_ones() -> None:
    before = [2.3, 2.1, 2.2, 2.0, 2.1]
    assert climbs_on(before, [900.0, 7e13, math.inf])
    assert climbs_on(before, [900.0, math.nan])
    assert not climbs_on(before, [2.0, math.nan])
    assert not climbs_on(before, [900.0, 3.0, math.nan])
    assert not climbs_on(before, [math.inf])


def test_a_leap_to_another_level_that_lasts_is_divergence() -> None:
    before = [0.01, -0.51, -1.37, -1.4, 655.0]
    assert climbs_on(before, [1.3e7, 1.3e19, 1.7e17, 6e17, 1.2e18])
    assert not climbs_on(before, [655.0, 900.0, 500.0, 620.0, 700.0])


def test_after_one_loss_a_thousandfold_rise_that_lasts_is_divergence() -> None:
    assert climbs_on([1.1, 1.17e6], [1.23e6, math.nan])
    assert not climbs_on([1.1, 2.3], [3.0, math.nan])
    assert not climbs_on([1.1, 1.17e6, 1.2], [1.23e6, math.nan])
    assert not climbs_on([0.0, 2.3], [3.0, math.nan])


def test_a_rise_after_fewer_than_five_losses_must_exceed_their_magnitude() -> None:
    before, continuation = [1.38, 1.39], [1.39, 1.4, 1.45, 1.6, 2.1]
    assert not climbs_on(before, continuation)
    assert climbs_on(before, [1.39, 30.0, 700.0])
    assert not climbs_on([], [1.0, 30.0, 700.0])
    assert not rose([1.0, 50.0])


def test_losses_of_harder_batches_have_not_risen_but_a_growing_loss_has() -> None:
    harder = [10.04, 10.05, 14.2, 12.9, 16.8, 13.1, 15.0]
    assert (rose(harder), rose(harder, are_of_batches=True)) == (True, False)
    growing = [10.04, 10.05, 14.2, 40.0, 90.0, 80.0, 400.0]
    assert rose(growing, are_of_batches=True)
    assert rose([1.0, 1.1, 0.9, 1.0, 1.05, 9.0, 12.0, 8.0], are_of_batches=True)  # five losses show their range


def test_a_loss_below_the_first_loss_cannot_have_risen() -> None:
    assert not may_have_risen([-1.0, -5.0, -20.0], -21.0)
    assert not may_have_risen([], 3.0)
    assert may_have_risen([1.0, math.nan, 2.0], math.nan)
    assert may_have_risen([1.0, 0.5], 40.0)


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([0.79, 1.34, 0.7, 1.98, 309.7, 272.1, 211.8, 2070.0], ("1.98", "2,070")),  # PPO, at a rate 1e5 times too large
        ([0.5, 0.4, 0.4, 4e15, math.nan, 4.5e15], ("0.4", "4.5e15")),
        ([4.4, 2e7, 2e6, 5e5, 8e5, 1e5], ("4.4", "100,000")),  # Adam, at a rate of 1,000
        ([4.4, 2e7, 2e6, 5e2, 8e5, 1e5], None),  # less than a thousand times the first
        ([0.5, 0.4, 0.4, 50.0, 0.4, 50.0, 50.0], None),  # the loss returns
        ([0.5, 0.4, 0.4, 500.0], None),  # a single loss may be a hard batch
        ([1e-4, -3.0, 5.0, -12.0, 40.0, -30.0, 60.0], None),  # the losses of a critic
        ([1.0, 1.1, 1.3, 2.0, 4.0, 8.0], None),
        ([0.0, 0.0, 0.0, 0.0], None),
        ([], None),
    ],
)
def test_a_note_reports_a_loss_that_stays_far_above_its_earlier_magnitude(
    losses: list[float], ends: tuple[str, str] | None
) -> None:
    told = risen(losses)
    assert told.startswith(f"the loss rose from {ends[0]} to {ends[1]} and stays there" if ends else "")
    assert bool(told) == bool(ends)
