"""A loss scale below 1 is said to work only where steps show it: gradients came through, and FP32 does not fail too."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.scale import ScaleCourse
from ampdbg.record.run import Investigation, Replay, Step
from tests.diagnosis.test_diagnose import record_of, steps_of

DESCENT = "x" * 17
"""From 65,536 to a half."""

NAN = (Replay("float16", 4.0, 1.0, math.nan, gradients=("w",)), Replay("float32", 1.0, 1.0, math.nan, gradients=("w",)))
OVERFLOW = (*NAN[:1], Replay("float32", 1.0, 1.0, 1.0))
FP64 = {"fails": Replay("float64", 1.0, 1.0, math.nan, gradients=("w",)), "comes through": Replay("float64", 1.0, 1, 1)}


def settled(steps: Sequence[Step]) -> float | None:
    return ScaleCourse(steps, len(steps)).settled_at


def with_norms(steps: Sequence[Step], norm: float | None) -> tuple[Step, ...]:
    """The steps with that norm of the gradients where they were taken."""
    return tuple(step if step.skipped else replace(step, grad_norm=norm) for step in steps)


def named(steps: Sequence[Step], *investigations: Investigation) -> set[str]:
    return {finding.code for finding in diagnose(record_of(steps, investigations=investigations)).findings}


@pytest.mark.parametrize("pattern", [DESCENT + "....", DESCENT + "..x...", DESCENT + "." * 9 + "x" + "." * 12])
def test_a_scale_below_one_works_where_gradients_came_through(pattern: str) -> None:
    assert "scale-runaway" in named(steps_of(pattern))
    assert "scale-collapse" not in named(steps_of(pattern))


def test_a_skip_behind_growth_does_not_tell_against_it() -> None:
    steps = steps_of(DESCENT + "." * 9 + "x" + "." * 3, interval=9)
    assert (steps[-5].scale, steps[-4].scale, steps[-1].scale) == (0.5, 1.0, 0.5)
    assert "scale-runaway" in named(steps)


@pytest.mark.parametrize("norm", [0.0, None, math.inf, math.nan])
def test_steps_without_gradients_show_nothing_of_a_scale(norm: float | None) -> None:
    found = named(with_norms(steps_of(DESCENT + "...."), norm))
    assert "scale-runaway" not in found
    assert "scale-collapse" in found


def test_steps_of_one_optimizer_between_skips_of_the_other_show_nothing_of_a_scale() -> None:
    found = named(steps_of("xxx." * 8))
    assert "scale-runaway" not in found
    assert "scale-collapse" in found


@pytest.mark.parametrize("fp64", FP64)
def test_where_fp32_fails_too_no_scale_is_said_to_work(fp64: str) -> None:
    steps, replays = steps_of(DESCENT + "...."), (*NAN, FP64[fp64])
    assert "scale-runaway" not in named(steps, Investigation(4, "gradients", *replays))
    assert "scale-runaway" in named(steps, Investigation(4, "gradients", *OVERFLOW))
    assert "scale-runaway" in named(steps, Investigation(4, "gradients", NAN[0], reproduced=0))


def test_a_scale_has_not_settled_where_only_steps_without_gradients_were_taken() -> None:
    assert settled(steps_of("xx..")) == 16384.0
    assert settled(with_norms(steps_of("xx.."), None)) == 16384.0  # it was not taken
    assert settled(with_norms(steps_of("xx.."), 0.0)) is None
    told = diagnose(record_of(with_norms(steps_of("xx.."), 0.0))).findings[0]
    assert told.code == "scale-calibration"
    assert "it has not settled yet" in told.message


def test_a_scale_that_fell_below_one_and_was_never_shown_to_work_has_a_cause_that_is_not_known() -> None:
    record = diagnose(record_of(with_norms(steps_of(DESCENT + "...."), 0.0)))
    assert ([finding.code for finding in record.findings], record.verdict) == (
        ["unknown", "scale-collapse"],
        "inconclusive",
    )
