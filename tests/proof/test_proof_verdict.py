"""What experiments say about a patch, in one plain line each."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ampdbg.remedy.proof.jobs import Patched, Seen, Trained, Tried
from ampdbg.remedy.proof.step_use import StepUse
from ampdbg.remedy.proof.verdict import (
    figures,
    further_batches,
    losses_as_in_fp32,
    same_in_fp32,
    training_run,
    use_of_a_step,
    with_the_patch,
    without_a_unit,
)


def tried(**changes: Any) -> Tried:
    healthy = {"step": 403, "healthy": True, "why": "", "loss": 1.172, "scale": 1024.0}
    return Tried(**{**healthy, "fp32_loss": 1.1722, "fp32_grad_norm": 2.0, **changes})


SICK = tried(healthy=False, why="loss NaN", loss=math.nan)


def test_a_healthy_step_shows_its_loss_beside_that_of_fp32() -> None:
    imported, step = with_the_patch(Seen(tried=(tried(),)), Patched())
    assert imported.passed
    assert (step.name, step.passed) == ("the failing step (403)", True)
    assert step.detail == "healthy; loss 1.1720, 1.1722 in FP32"


def test_a_step_that_is_not_cured_says_why() -> None:
    *_, step = with_the_patch(Seen(tried=(tried(), SICK)), Patched())
    assert (step.passed, step.detail) == (False, "loss NaN")


def test_what_cannot_be_imported_is_all_that_is_said() -> None:
    (step,) = with_the_patch(Seen(failure="importing net.py raised SyntaxError: invalid syntax"), Patched())
    assert (step.passed, step.detail) == (False, "importing net.py raised SyntaxError: invalid syntax")


@pytest.mark.parametrize(
    ("seen", "passed", "detail"),
    [
        (Seen(tried=(SICK,)), True, "step 403 fails: loss NaN"),
        (Seen(tried=(tried(), tried(step=7, healthy=False, why="loss inf"))), True, "step 7 fails: loss inf"),
        (Seen(tried=(tried(),)), False, "not needed: healthy; loss 1.1720, 1.1722 in FP32"),
        (
            Seen(failure="importing net.py raised NameError"),
            False,
            "could not be run: importing net.py raised NameError",
        ),
    ],
    ids=["fails", "fails in another step", "not needed", "could not be run"],
)
def test_a_unit_is_needed_when_the_step_fails_without_it(seen: Seen, passed: bool, detail: str) -> None:
    step = without_a_unit("line 49", seen)
    assert (step.name, step.passed, step.detail) == ("without line 49", passed, detail)


@pytest.mark.parametrize(
    ("change", "recorded", "passed"),
    [
        ({}, 1.1722, True),
        ({"fp32_loss": 1.1722 * 1.0005}, 1.1722, True),
        ({"fp32_loss": 1.1722 * 1.01}, 1.1722, False),
        ({"fp32_loss": 1.1722 * 1.01}, 1.1722 * 1.005, True),
        ({"fp32_grad_norm": 2.1}, 1.1722, False),
        ({"fp32_loss": math.nan}, 1.1722, False),
    ],
    ids=["the same", "rounding", "another loss", "within what it varies by", "other gradients", "NaN"],
)
def test_the_function_is_the_same_when_fp32_is(change: dict[str, float], recorded: float, passed: bool) -> None:
    step = same_in_fp32(Seen(tried=(tried(**change),)), Seen(tried=(SICK,)), {403: recorded})
    assert step.passed is passed
    assert step.detail.startswith("unchanged" if passed else "changed")


def test_further_batches_are_counted() -> None:
    assert further_batches(Seen(further=(tried(),) * 3)).detail == "3 of 3 healthy"
    bad = further_batches(Seen(further=(tried(), SICK, tried())))
    assert (bad.passed, bad.detail) == (False, "2 of 3 healthy; loss NaN")
    none = further_batches(Seen(further_failure="config.yaml:2: data ended after 1 batches"))
    assert (none.passed, none.detail) == (True, "none to try: config.yaml:2: data ended after 1 batches")


@pytest.mark.parametrize(
    ("trained", "passed", "detail"),
    [
        (Trained(scale=65536, skipped=(0,)), True, "healthy; loss scale 65536, 1 skipped step, 50 without the patch"),
        (Trained(scale=1, faults=("forward-overflow: x",)), False, "forward-overflow: x"),
        (Trained(failure="step raised KeyError"), False, "step raised KeyError"),
    ],
    ids=["healthy", "a finding", "an error"],
)
def test_a_run_with_the_patch_must_show_no_finding_of_precision(trained: Trained, passed: bool, detail: str) -> None:
    step = training_run(trained, Trained(skipped=tuple(range(50))), 50)
    assert (step.name, step.passed, step.detail) == ("training 50 steps", passed, detail)


def test_findings_that_no_pin_cures_are_named() -> None:
    trained = Trained(scale=8, beside=("misuse-clip-scaled", "misuse-clip-scaled"))
    assert training_run(trained, None, 5).detail == "healthy, but for misuse-clip-scaled; loss scale 8, 0 skipped steps"


def test_one_step_is_told_as_one() -> None:
    assert training_run(Trained(scale=8), None, 1).name == "training 1 step"
    assert losses_as_in_fp32(curve(1.01, 1), curve(1.0, 1), None).detail == "1% from FP32's (the last step)"
    assert losses_as_in_fp32(curve(1.01, 1), curve(1.0, 2), None).detail == "the run ended after 1 step"


def curve(factor: float, count: int = 8) -> Trained:
    return Trained(losses=(factor,) * count)


@pytest.mark.parametrize(
    ("trained", "float32", "rounded", "passed", "said"),
    [
        (curve(1.01), curve(1.0), curve(1.002), True, "1% from FP32's (median of the last 2 steps)"),
        (curve(1.10), curve(1.0), curve(1.002), False, "10% from FP32's"),
        (curve(1.10), curve(1.0), curve(1.03), True, "FP32's own, from weights rounded to half: 3%"),
        (curve(1.10), curve(1.0), None, True, "10% from FP32's"),
        (curve(math.nan), curve(1.0), curve(1.0), False, "not finite: the last is nan"),
        (curve(1.0, 3), curve(1.0), None, False, "the run ended after 3 steps"),
        (curve(1.0), curve(math.nan), None, True, "not compared: FP32 does not stay finite"),
        (curve(1.0), Trained(failure="raised KeyError"), None, True, "not compared: FP32 raised KeyError"),
    ],
    ids=["near", "far", "far, as FP32 itself", "only told", "NaN", "ended early", "FP32 diverges", "FP32 raises"],
)
def test_losses_stay_within_the_noise_of_fp32(
    trained: Trained, float32: Trained, rounded: Trained | None, passed: bool, said: str
) -> None:
    step = losses_as_in_fp32(trained, float32, rounded)
    assert step.passed is passed
    assert said in step.detail


def test_figures_hold_what_was_measured_and_no_more() -> None:
    patched = Seen(
        runs={"patched": Trained(losses=(2.0, 1.0), scale=8, skipped=(0,))},
        uses={"patched": StepUse(0.5, 3 * 2**20, 2**30)},
    )
    reference = Seen(
        runs={"float32": Trained(losses=(2.0, 1.25)), "unpatched": Trained(failure="raised")},
        uses={"float32": StepUse(0.4, 6 * 2**20)},
    )
    numbers = figures(patched, reference, 2)
    assert numbers == {
        "steps": 2.0,
        "step_seconds_patched": 0.5,
        "saved_bytes_patched": 3 * 2**20,
        "peak_bytes_patched": 2**30,
        "step_seconds_float32": 0.4,
        "saved_bytes_float32": 6 * 2**20,
        "loss_scale_patched": 8.0,
        "skipped_patched": 1.0,
        "loss_patched": 1.0,
        "loss_float32": 1.25,
        "loss_difference": 0.2,
    }
    use = use_of_a_step(numbers)
    assert use is not None
    assert use.detail == "0.5 s (FP32 0.4 s); 3.0 MiB kept for the backward pass (FP32 6.0 MiB); 1024.0 MiB at the peak"
    assert use_of_a_step({}) is None
