"""A loss scale below 1 counts as working only if gradients came through at it and FP32 does not fail too."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.scale import scalings
from ampdbg.record.run import Investigation, Replay, Step
from tests.diagnosis.test_diagnose import record_of, steps_of

DESCENT = "x" * 17
"""From 65,536 to 0.5."""

NAN = (Replay("float16", 4.0, 1.0, math.nan, gradients=("w",)), Replay("float32", 1.0, 1.0, math.nan, gradients=("w",)))
OVERFLOW = (*NAN[:1], Replay("float32", 1.0, 1.0, 1.0))
FP64 = {"fails": Replay("float64", 1.0, 1.0, math.nan, gradients=("w",)), "comes through": Replay("float64", 1.0, 1, 1)}


def settled(steps: Sequence[Step]) -> float | None:
    return next(scalings(record_of(steps))).settled_at


def with_norms(steps: Sequence[Step], norm: float | None) -> tuple[Step, ...]:
    """The steps, with this gradient norm on each step that was not skipped."""
    return tuple(step if step.skipped else replace(step, grad_norm=norm) for step in steps)


def named(steps: Sequence[Step], *investigations: Investigation) -> set[str]:
    return {finding.code for finding in diagnose(record_of(steps, investigations=investigations)).findings}


@pytest.mark.parametrize("pattern", [DESCENT + "....", DESCENT + "..x...", DESCENT + "." * 9 + "x" + "." * 12])
def test_a_scale_below_1_works_if_gradients_came_through(pattern: str) -> None:
    record = diagnose(record_of(steps_of(pattern)))
    assert ([(one.code, one.root) for one in record.findings], record.verdict) == ([("scale-runaway", None)], "other")


def test_a_skip_after_growth_does_not_refute_a_scale_below_1() -> None:
    steps = steps_of(DESCENT + "." * 9 + "x" + "." * 3, interval=9)
    assert (steps[-5].scale, steps[-4].scale, steps[-1].scale) == (0.5, 1.0, 0.5)
    assert "scale-runaway" in named(steps)


@pytest.mark.parametrize("norm", [0.0, None, math.inf, math.nan])
def test_steps_without_finite_nonzero_gradients_do_not_prove_that_a_scale_works(norm: float | None) -> None:
    found = named(with_norms(steps_of(DESCENT + "...."), norm))
    assert "scale-runaway" not in found
    assert "scale-collapse" in found


def test_a_step_taken_after_every_third_skip_does_not_prove_that_a_scale_works() -> None:
    """Two optimizers that share a scaler leave this pattern if the gradients of one overflow."""
    found = named(steps_of("xxx." * 8))
    assert "scale-runaway" not in found
    assert "scale-collapse" in found


@pytest.mark.parametrize("fp64", FP64)
def test_no_usable_scale_is_reported_if_fp32_fails_too(fp64: str) -> None:
    steps, replays = steps_of(DESCENT + "...."), (*NAN, FP64[fp64])
    assert "scale-runaway" not in named(steps, Investigation(4, "gradients", *replays))
    assert "scale-runaway" in named(steps, Investigation(4, "gradients", *OVERFLOW))
    assert "scale-runaway" in named(steps, Investigation(4, "gradients", NAN[0], reproduced=0))


def test_a_scale_has_not_settled_if_every_step_taken_has_zero_gradients() -> None:
    assert settled(steps_of("xx..")) == 16384.0
    assert settled(with_norms(steps_of("xx.."), None)) == 16384.0  # no gradient norm was measured
    assert settled(with_norms(steps_of("xx.."), 0.0)) is None
    told = diagnose(record_of(with_norms(steps_of("xx.."), 0.0))).findings[0]
    assert told.code == "scale-calibration"
    assert "it has not settled yet" in told.message


def test_a_scale_below_1_that_never_worked_has_an_unknown_cause() -> None:
    record = diagnose(record_of(with_norms(steps_of(DESCENT + "...."), 0.0)))
    assert ([finding.code for finding in record.findings], record.verdict) == (
        ["unknown", "scale-collapse"],
        "inconclusive",
    )
