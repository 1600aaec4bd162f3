"""The verdict of each experiment on a patch, in one plain line."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ampdbg.config.schema import Precision
from ampdbg.patch.file_edits import Patched
from ampdbg.proof.jobs import JobResult, StepUse, Trained, Tried, disproves
from ampdbg.proof.proof import (
    further_batches,
    in_eval_mode,
    losses_as_in_fp32,
    same_in_fp32,
    training_run,
    use_of_a_step,
    why_nothing_was_trained,
    with_the_patch,
    without_a_unit,
)
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding, Phase, Severity
from ampdbg.record.run import Investigation, Replay, Step


def tried(
    why: str = "",
    *,
    step: int = 403,
    loss: float = 1.172,
    scale: float = 1024.0,
    fp32_loss: float = 1.1722,
    fp32_grad_norm: float = 2.0,
    **changes: Any,
) -> Tried:
    low = Replay("float16", scale, loss, 2.0, unreached=changes.pop("unreached", ()))
    fp32 = Replay("float32", 1.0, fp32_loss, fp32_grad_norm)
    return Tried(Investigation(step, "loss", low, fp32, **changes), why, scale)


SICK = tried("loss NaN", loss=math.nan)


def test_a_healthy_step_shows_both_losses_and_warns_of_parameters_without_gradient() -> None:
    seen = JobResult(tried=(tried(unreached=("head.weight", "head.bias")),))
    imported, step, gradients = with_the_patch(seen, Patched())
    assert imported.passed
    assert (step.name, step.passed, step.warns) == ("the failing step (403)", True, False)
    assert step.detail == "healthy; loss 1.1720, 1.1722 in FP32"
    assert (gradients.name, gradients.passed, gradients.warns) == ("the gradients of step 403", True, True)
    assert gradients.detail == "head.weight and head.bias have no gradient at any loss scale, and have one in FP32"
    assert list(with_the_patch(JobResult(tried=(tried(),)), Patched())) == [imported, step]


def test_details_name_the_module_outputs_if_the_step_ended_before_its_loss() -> None:
    seen = JobResult(tried=(tried(reach="modules"),))
    *_, step = with_the_patch(seen, Patched())
    assert step.detail == "healthy; the sum of its module outputs: 1.1720, 1.1722 in FP32"
    same = same_in_fp32(seen, seen, [1.1722])
    assert same.detail == "unchanged: in FP32 the sum of its module outputs is 1.1722 with and without the patch"
    other = same_in_fp32(seen, JobResult(tried=(tried(fp32_loss=2.0),)), [2.0])
    assert other.detail == ("changed: in FP32 the sum of its module outputs of step 403 is 1.1722, 2.0000 without it")


IMPORT = "importing net.py raised SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    ("seen", "why"), [(JobResult(tried=(tried(), SICK)), "loss NaN"), (JobResult(failure=IMPORT), IMPORT)]
)
def test_the_last_step_gives_the_reason_if_the_failing_step_fails_or_cannot_run(seen: JobResult, why: str) -> None:
    *others, step = with_the_patch(seen, Patched())
    assert (step.passed, step.detail) == (False, why)
    assert bool(others) is not bool(seen.failure)


@pytest.mark.parametrize(
    ("seen", "passed", "detail"),
    [
        (JobResult(tried=(SICK,)), True, "step 403 fails: loss NaN"),
        (JobResult(tried=(tried(), tried("loss inf", step=7))), True, "step 7 fails: loss inf"),
        (JobResult(tried=(tried(),)), False, "not needed: healthy; loss 1.1720, 1.1722 in FP32"),
        (
            JobResult(failure="importing net.py raised NameError"),
            False,
            "could not be run: importing net.py raised NameError",
        ),
    ],
    ids=["fails", "fails in another step", "not needed", "could not be run"],
)
def test_a_unit_is_needed_only_if_the_step_fails_without_it(seen: JobResult, passed: bool, detail: str) -> None:
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
def test_the_function_is_unchanged_if_fp32_results_are(change: dict[str, Any], recorded: float, passed: bool) -> None:
    step = same_in_fp32(JobResult(tried=(tried(**change),)), JobResult(tried=(SICK,)), [recorded])
    assert step.passed is passed
    assert step.detail.startswith("unchanged" if passed else "changed")


def test_the_healthy_further_batches_are_counted() -> None:
    assert further_batches(JobResult(further=(tried(),) * 3)).detail == "3 of 3 healthy"
    bad = further_batches(JobResult(further=(tried(), SICK, tried())))
    assert (bad.passed, bad.detail) == (False, "2 of 3 healthy; loss NaN")
    none = further_batches(JobResult(further_failure="config.yaml:2: data ended after 1 batches"))
    assert (none.passed, none.ran, none.detail) == (True, False, "not run: config.yaml:2: data ended after 1 batches")


@pytest.mark.parametrize(
    ("patched", "unpatched", "passed", "detail"),
    [
        ("", "", True, "the failing step's batch runs through"),
        ("", "Net raised KeyError: 'x'", True, "the failing step's batch runs through"),
        ("Net raised E: x", "Net raised F", True, "not run: the unpatched model raises too (Net raised F)"),
        ("Net raised E: x", "", False, "Net raised E: x; without the patch it does not"),
    ],
    ids=["runs", "only the unpatched raises", "both raise", "only the patched raises"],
)
def test_eval_mode_fails_only_for_errors_of_the_patch(patched: str, unpatched: str, passed: bool, detail: str) -> None:
    step = in_eval_mode(JobResult(eval_failure=patched), JobResult(eval_failure=unpatched))
    assert (step.name, step.passed, step.detail) == ("in eval mode", passed, detail)


@pytest.mark.parametrize(
    ("trained", "passed", "detail"),
    [
        (Trained(scale=65536.0, skipped=(0,)), True, "healthy; loss scale 65,536, 1 skipped step"),
        (Trained(scale=1.0, faults=("forward-overflow: x",)), False, "forward-overflow: x"),
        (Trained(failure="step raised KeyError"), False, "step raised KeyError"),
    ],
    ids=["healthy", "a finding", "an error"],
)
def test_a_training_run_fails_with_a_precision_finding_or_an_error(trained: Trained, passed: bool, detail: str) -> None:
    step = training_run(replace(trained, steps=50))
    assert (step.name, step.passed, step.detail) == ("training 50 steps", passed, detail)


def test_findings_that_no_pin_fixes_are_named_as_exceptions() -> None:
    trained = Trained(steps=5, scale=8.0, beside=("misuse-clip-scaled", "misuse-clip-scaled"))
    assert training_run(trained).detail == "healthy, except for misuse-clip-scaled; loss scale 8, 0 skipped steps"


def test_the_training_detail_names_the_loss_scale_at_which_the_run_started() -> None:
    step = training_run(Trained(steps=14, scale=1024.0, begun_at=2048.0, skipped=(0,)))
    assert step.detail == (
        "healthy; loss scale 1,024, 1 skipped step; started at 2,048, a scale that suits the failing step"
    )


def test_a_training_run_that_skips_every_step_fails_and_names_a_lower_scale() -> None:
    skipped = Trained(steps=2, losses=(1.5, 1.6), skipped=(0, 1), scale=32768.0)
    why = why_nothing_was_trained(Precision(), skipped, [tried(scale=65536.0)])
    step = training_run(skipped, why)
    assert not step.passed
    assert step.detail == (
        "every step was skipped, so nothing was trained: the loss scale of 32768 is too large for the "
        "gradients: --set precision.loss_scale.init=8192"
    )
    static = why_nothing_was_trained(Precision(loss_scale=65536.0), skipped, [tried(scale=256.0)])
    assert static.endswith("the loss scale of 32768 is too large for the gradients: --set precision.loss_scale=256")
    one_taken = replace(skipped, skipped=(0,))
    assert why_nothing_was_trained(Precision(), one_taken, [tried()]) == ""


def test_names_and_details_use_the_singular_for_one_step() -> None:
    assert training_run(Trained(steps=1, scale=8.0)).name == "training 1 step"
    assert losses_as_in_fp32(curve(1.01, 1), curve(1.0, 1), None).detail == "1% from FP32's (the last step)"
    assert losses_as_in_fp32(curve(1.01, 1), curve(1.0, 2), None).detail == "the run ended after 1 step"


def test_losses_of_skipped_steps_are_not_evidence() -> None:
    trained = Trained(losses=(1.0, 1.0, 2.0, 1.0), skipped=(0, 1, 3))
    step = losses_as_in_fp32(trained, curve(1.0, 4), curve(1.0, 4))
    assert (step.passed, step.detail.partition(";")[0]) == (False, "100% from FP32's (the last step taken)")
    none = losses_as_in_fp32(replace(curve(1.0, 2), skipped=(0, 1)), curve(9.0, 2), None)
    assert (none.passed, none.ran, none.detail) == (True, False, "not run: no step was taken")


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
        (curve(1.0), curve(math.nan), None, True, "not run: FP32 does not stay finite"),
        (curve(1.0), Trained(failure="raised KeyError"), None, True, "not run: FP32 raised KeyError"),
    ],
    ids=["near", "far", "far, as FP32 itself", "only told", "NaN", "ended early", "FP32 diverges", "FP32 raises"],
)
def test_losses_fail_beyond_the_noise_of_fp32_or_if_they_are_nan_or_too_few(
    trained: Trained, float32: Trained, rounded: Trained | None, passed: bool, said: str
) -> None:
    step = losses_as_in_fp32(trained, float32, rounded)
    assert step.passed is passed
    assert said in step.detail


def test_the_use_of_a_step_shows_only_measured_values() -> None:
    uses = {"patched": StepUse(0.5, 3 * 2**20, 2**30), "float32": StepUse(0.4, 6 * 2**20)}
    (use,) = use_of_a_step(uses)
    assert use.detail == "500 ms (FP32 400 ms); 3.1 MB kept for the backward pass (FP32 6.3 MB); 1.1 GB at the peak"
    assert list(use_of_a_step({})) == []
    emulated = {name: replace(use, seconds=None) for name, use in uses.items()}
    (told,) = use_of_a_step(emulated)
    assert (use.name, told.name) == ("time and memory of a step", "memory of a step")
    assert told.detail == use.detail.partition("; ")[2]


def found(code: str, severity: Severity = "error", phase: Phase = "backward") -> Finding:
    return Finding(code, severity, 3, phase, "what went wrong")


SETTLED = tuple(Step(number, 1.0, 32768.0, number == 0, skipped=number == 0) for number in range(8))
FALLING = tuple(Step(number, 1.0, 2.0**-number, True, skipped=True) for number in range(8))
NAN_AT_THE_END = (*SETTLED, Step(8, math.nan, 32768.0, True, skipped=False))


@pytest.mark.parametrize(
    ("finding", "steps", "expected"),
    [
        (found("silent-overflow", "warning", "forward"), SETTLED, False),
        (found("silent-overflow", "error", "forward"), SETTLED, True),
        (found("no-usable-scale"), SETTLED, False),
        (found("no-usable-scale"), FALLING, True),
        (found("scale-collapse"), SETTLED, False),
        (found("scale-collapse"), FALLING, True),
        (found("gradient-overflow"), NAN_AT_THE_END, True),
        (found("gradient-overflow"), (), True),
        (found("true-nan"), FALLING, False),
        (found("precision-loss"), SETTLED, True),
        (found("unknown"), SETTLED, True),
        (found("hardware"), SETTLED, True),
    ],
)
def test_only_a_lasting_failure_disproves_a_patch(finding: Finding, steps: tuple[Step, ...], expected: bool) -> None:
    assert disproves(finding, steps) == expected


def test_only_gradient_findings_may_pass_in_a_run_that_settles() -> None:
    passing = {code.name for code in CODES.values() if code.passes}
    assert set() < passing <= {code.name for code in CODES.values() if code.family == "Gradients and loss scale"}
    for name in CODES.keys() - passing:
        assert disproves(found(name), SETTLED) == CODES[name].counts_against_a_patch
