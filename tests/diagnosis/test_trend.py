"""Trends: values near the limit, and values that grow by a constant factor, with the step of the forecast."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.trend import reached_at
from ampdbg.record.run import Environment, Record, Step, Trend

STEPS = tuple(range(100, 2100, 100))
ENVIRONMENT = Environment("0", "3", "2", "linux", "cpu", "", "cuda", emulated=True)
Kind = Literal["activation", "gradient", "scale"]


def trend(value: Callable[[int], float], kind: Kind = "activation", steps: tuple[int, ...] = STEPS) -> Trend:
    return Trend(kind, "" if kind == "scale" else "body", steps, tuple(map(value, steps)))


def recorded(*trends: Trend) -> Record:
    steps = tuple(Step(number, 1.0, 65536.0, found_inf=False, skipped=False) for number in range(2100))
    return diagnose(Record("run", "2026", ENVIRONMENT, {}, "inconclusive", steps, trends=trends))


NOISE = random.Random(3)


def doubling(step: int) -> float:
    return 2.0 ** (step / 200)


@pytest.mark.parametrize(
    ("value", "at"),
    [
        (doubling, 3200),
        (lambda step: 100 * 2.0 ** (step / 400), 3742),
        (lambda step: 2.0 ** (step / 200 + NOISE.gauss(0, 0.3)), 3200),
    ],
    ids=["from 1", "from 100", "noisy"],
)
def test_steady_growth_is_extrapolated_to_the_step_of_the_limit(value: Callable[[int], float], at: int) -> None:
    reached = reached_at(trend(value))
    assert reached is not None
    assert reached == pytest.approx(at, rel=0.03)


HEALTHY: dict[str, Callable[[int], float]] = {
    "flat": lambda step: 1000.0,
    "near the limit and flat": lambda step: 60_000.0,
    "noise around a level": lambda step: 1000.0 * 2.0 ** NOISE.gauss(0, 0.5),
    "falls": lambda step: 1000.0 * 2.0 ** (-step / 300),
    "levels off": lambda step: 10_000.0 * (1 - math.exp(-step / 200)),
    "grows at the start of the training alone": lambda step: min(4000.0, 2.0 ** (step / 60)),
    "swings": lambda step: 1000.0 * 2.0 ** (3 * math.sin(step / 150)),
    "a step line": lambda step: 100.0 if step < 1200 else 30_000.0,
    "by a constant": lambda step: 1.0 + step,
    "too slow": lambda step: 10.0 * 2.0 ** (step / 3000),
    "too far ahead": lambda step: 1e-3 * 2.0 ** (step / 900),
    "a single spike": lambda step: 60_000.0 if step == 1500 else 100.0,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_values_without_steady_growth_give_no_finding(name: str) -> None:
    one = trend(HEALTHY[name])
    assert reached_at(one) is None
    assert recorded(one).findings == ()


NEAR: dict[str, Callable[[int], float]] = {
    "by a constant": lambda step: 2180.0 + 26.0 * step,
    "levels off": lambda step: 50_000.0 * (1 - math.exp(-step / 300)),
    "swings": lambda step: 8000.0 * 2.0 ** (2.9 * math.sin(step / 150)),
    "at once": lambda step: 5000.0 if step < 1200 else 50_000.0,
}


@pytest.mark.parametrize("name", NEAR)
def test_an_activation_within_one_bit_of_the_limit_is_a_warning(name: str) -> None:
    one = trend(NEAR[name])
    (found,) = recorded(one).findings
    largest = max(one.values)
    assert (found.severity, found.module, found.evidence["value"]) == ("warning", "body", largest)
    assert found.step == one.steps[one.values.index(largest)]
    assert f"{largest / 65504:.1%} of FP16's limit of 65,504" in found.message
    assert recorded(replace(one, kind="gradient")).findings == ()


def test_seven_samples_are_too_few_for_a_trend_and_eight_suffice() -> None:
    assert reached_at(trend(doubling, steps=STEPS[:7])) is None
    assert reached_at(trend(doubling, steps=STEPS[-8:])) is not None


def test_a_near_forecast_is_a_warning_and_a_far_one_is_information() -> None:
    near = recorded(trend(doubling))
    (found,) = near.findings
    assert (found.code, found.severity, found.module, found.step) == ("limit-ahead", "warning", "body", 2000)
    assert found.evidence["reached_at"] == 3200
    assert "from 1.414 to 1,024 in steps 100 to 2,000, and would reach FP16's limit of 65,504 near step 3,200" in (
        found.message
    )
    assert near.verdict == "inconclusive"
    far = recorded(trend(lambda step: 2.0 ** (step / 400)))
    assert [(one.code, one.severity) for one in far.findings] == [("limit-ahead", "info")]
    assert far.verdict == "healthy"


def test_the_finding_names_the_trend_that_reaches_the_limit_first() -> None:
    slow = Trend("activation", "slow", STEPS, tuple(2.0 ** (step / 300) for step in STEPS))
    fast = trend(doubling)
    gradient = trend(lambda step: 2.0 ** (step / 150), "gradient")
    (found,) = recorded(slow, fast).findings
    assert (found.module, found.parameter, found.phase) == ("body", "", "forward")
    (found,) = recorded(slow, fast, gradient).findings
    assert (found.module, found.parameter, found.phase) == ("", "body", "backward")


def test_only_a_steadily_falling_loss_scale_is_reported() -> None:
    (found,) = recorded(trend(lambda step: 65536.0 / 2.0 ** (step // 250), "scale")).findings
    assert "the loss scale falls steadily, from 65,536 to 256 in steps 100 to 2,000, and would reach 1" in found.message
    for value in (lambda step: 65536.0, lambda step: 256.0 * 2.0 ** (step // 200)):
        assert recorded(trend(value, "scale")).findings == ()
