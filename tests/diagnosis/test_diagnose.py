"""Diagnosis of records made by hand: the exact findings and verdict."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ampdbg.diagnosis.diagnose as diagnosis
from ampdbg.commands.scan import exit_code
from ampdbg.diagnosis.cause import Evidence
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.producers import culprit
from ampdbg.diagnosis.scale import MANY_UNEXPLAINED, scalings
from ampdbg.quantities import number
from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import (
    AutocastError,
    Environment,
    FrozenParameter,
    GroupOverflow,
    Investigation,
    Misuse,
    ParameterCounts,
    Producer,
    Record,
    Replay,
    ScriptRun,
    Step,
    StuckMoment,
    TensorCounts,
    Updates,
)
from ampdbg.report.scan import headline, next_command
from ampdbg.report.view import CommandContext

ENVIRONMENT = Environment("0", "3", "2", "Linux", "cpu", "x86_64", "cuda", emulated=True)
GROUPS = ("block1.0.attn.qkv.weight", "block1.0.attn.proj.weight", "head.weight")


OVERFLOWS = Producer("backward", "head", 0, "aten.mm.default", None, "float16", 9.0, 9.0, 1, 0, 4, fp32_largest=2.0)


def group(index: int) -> GroupOverflow:
    return GroupOverflow(index, GROUPS[index], (ParameterCounts(GROUPS[index], inf=1, nan=0, size=4),))


def steps_of(pattern: str, interval: int = 10_000, hit: Sequence[int] = (0,)) -> tuple[Step, ...]:
    """Steps from a string: ``.`` healthy, ``x`` skipped with a finite loss, ``N`` skipped with a NaN loss,
    ``I`` an infinite loss without a skip. The scale moves as under GradScaler."""
    made, scale, healthy = [], 65536.0, 0
    for index, mark in enumerate(pattern):
        skipped = mark in "xN"
        loss = {"N": math.nan, "I": math.inf}.get(mark, 1.0)
        groups = tuple(group(i) for i in (hit if mark == "x" else range(len(GROUPS)))) if skipped else ()
        made.append(Step(index, loss, scale, found_inf=skipped, skipped=skipped, grad_norm=1.0, groups=groups))
        healthy = 0 if skipped else healthy + 1
        if skipped:
            scale *= 0.5
        elif healthy == interval:
            scale, healthy = scale * 2, 0
    return tuple(made)


def losing(pattern: str, losses: Sequence[float]) -> list[Step]:
    """Steps as from ``steps_of``, with these losses."""
    return [replace(step, loss=loss) for step, loss in zip(steps_of(pattern), losses, strict=True)]


def record_of(steps: Sequence[Step], **fields: object) -> Record:
    record = Record("scan", "2026-01-01T00:00:00+00:00", ENVIRONMENT, {"precision": {"level": "O1"}}, "inconclusive")
    return replace(record, steps=tuple(steps), groups=GROUPS, planned_steps=len(steps), **fields)  # type: ignore[arg-type]


FP32 = Replay("float32", 1.0, 1.0, 1.0)


def low(**changes: Any) -> Replay:
    """A replay in half at the first loss scale, with a finite loss and non-finite gradients."""
    return replace(Replay("float16", 65536.0, 1.0, math.inf, gradients=("head.weight",)), **changes)


def cured(at: Replay, scale: float, **changes: Any) -> Replay:
    """The same replay at a lower loss scale, at which everything is finite."""
    return replace(at, scale=scale, producers=(), grad_norm=1.0, gradients=(), **changes)


def gradient_investigation(step: int, low: Replay, fp32: Replay, *at_lower: Replay, **fields: Any) -> Investigation:
    return Investigation(step, "gradients", low, fp32, at_lower=at_lower, loss=1.0, **fields)


def diagnosed(steps: str | Sequence[Step], *investigations: Investigation, **fields: Any) -> Record:
    made = steps_of(steps) if isinstance(steps, str) else steps
    return diagnose(record_of(made, investigations=investigations, **fields))


def codes(record: Record) -> list[tuple[str, str, int | None]]:
    return [(finding.code, finding.phase, finding.root) for finding in record.findings]


def test_a_skip_without_an_explanation_is_healthy_but_not_called_normal() -> None:
    for pattern, is_normal in (("xx" + "." * 50, True), ("xx" + "." * 50 + "x" + "." * 50, False)):
        record = diagnosed(pattern)
        (found,) = record.findings
        said = f"{headline(record).sentence} {found.message}"
        assert record.verdict == "healthy"
        assert said.count("normal") == 2 * is_normal
        assert ("No replay compared step 52 with FP32" in said) is not is_normal
        assert said.endswith(", but so few skipped steps do no harm") is not is_normal
        assert found.evidence.get("unexplained") == (None if is_normal else [52])


def with_nan_only(step: Step) -> Step:
    counts = (ParameterCounts(GROUPS[0], inf=0, nan=4, size=4),)
    return replace(step, groups=(GroupOverflow(0, GROUPS[0], counts),))


def test_a_skip_with_nan_but_no_inf_at_the_start_or_after_a_taken_step_is_not_called_normal() -> None:
    steps = steps_of("xx....xx.....")
    of_nan = [[with_nan_only(step) if step.step == at else step for step in steps] for at in (0, 1, 6, 7)]
    for made, told in zip((steps, *of_nan), (None, [0], None, [6], None), strict=True):
        record = diagnosed(made)
        (found,) = record.findings
        assert (record.verdict, found.evidence.get("unexplained")) == ("healthy", told)
        assert ("this is normal" in found.message) is (told is None)
        is_first = told == [0]
        assert ("the first step has NaN and no inf, which a lower scale may not cure" in found.message) is is_first
        explains = "some skips come neither at the start nor after the scale has grown"
        assert (explains in found.message) is (told == [6])
        assert (f". No replay compared step {0 if is_first else 6} with FP32" in found.message) is (told is not None)
        assert found.remedy == ("none is needed while they are so few" if told else ADVICE.format(4096))


@pytest.mark.parametrize(
    "pattern",
    [
        "." * 50,
        "xxxx" + "." * 46,
        "x.x..x" + "." * 50,
        "x" * 11 + "." * 12,
        "." * 100 + "x" + "." * 100,
        "." * 60 + "x" + "." * 60 + "x" + "." * 60,
        "xxx.",
    ],
)
def test_skips_that_settle_the_scale_and_rare_later_skips_are_healthy(pattern: str) -> None:
    record = diagnosed(pattern)
    assert record.verdict == "healthy"
    assert codes(record) == ([("scale-calibration", "backward", None)] if "x" in pattern else [])


def test_a_run_without_a_taken_step_is_inconclusive() -> None:
    record = diagnosed("xxx")
    assert (record.verdict, codes(record)) == ("inconclusive", [("scale-calibration", "backward", None)])
    assert "not settled yet" in record.findings[0].message
    said = headline(record)
    assert said.sentence == "Inconclusive: 3 of 3 steps skipped while the loss scale settles; it has not settled yet."
    assert said.tone == "doubtful"
    assert exit_code(record, "warning") == 0
    told = next_command(replace(record, planned_steps=3), CommandContext("config.yaml"))
    assert told is not None
    assert told.command == "ampdbg scan config.yaml --steps 30"
    assert (
        next_command(replace(record, script=ScriptRun("train.py"), command="run"), CommandContext("train.py")) is None
    )


ADVICE = "none is needed; GradScaler(init_scale={}) saves the skipped steps"


@pytest.mark.parametrize(
    ("pattern", "interval", "at", "remedy"),
    [
        ("xxx....", 10_000, 8192.0, ADVICE.format(8192)),
        ("xxx.", 10_000, 8192.0, ADVICE.format(8192)),
        (".x", 10_000, None, ""),  # 65,536 was skipped, and no other was tried
        (".x.", 10_000, 32768.0, ADVICE.format(32768)),
        (".x..x", 10_000, None, ""),  # 32,768 worked, and was skipped later
        (".x..x.", 10_000, 16384.0, ADVICE.format(16384)),
        ("." * 30 + "x" + "." * 5, 30, 65536.0, "none is needed"),  # the initial scale
        ("." * 30 + "x", 30, 65536.0, "none is needed"),
        ("x....x....x....", 4, 32768.0, "none is needed"),  # it grows to 65,536 again, wherever it starts
        ("x" + "." * 30, 10, 131072.0, "none is needed"),  # the grown scale would be skipped at the start
    ],
)
def test_a_scale_settles_at_a_taken_step_without_a_later_skip_at_or_below_it(
    pattern: str, interval: int, at: float | None, remedy: str
) -> None:
    record = diagnose(record_of(steps_of(pattern, interval)))
    [finding] = record.findings
    assert (finding.code, finding.evidence.get("scale"), finding.remedy) == ("scale-calibration", at, remedy)
    told = finding.message + headline(record).sentence
    assert ("not settled yet" in told) is (at is None)
    assert at is None or told.count(f"settled at {number(at)}") == 2


def of_optimizers(steps: Sequence[Step], optimizers: str) -> list[Step]:
    """The steps, each assigned to the optimizer of the given digit."""
    return [
        replace(step, optimizer=int(mark), others=step.step - optimizers[: step.step].count(mark))
        for step, mark in zip(steps, optimizers, strict=True)
    ]


@pytest.mark.parametrize(("other", "scale"), [(0, 1.0), (2, 1024.0)])
def test_steps_with_another_or_no_scaler_do_not_affect_where_a_scale_settles(other: int, scale: float) -> None:
    scaled = [replace(step, scaler=1) for step in steps_of("x..")]
    steps = steps_of("." * 5)
    apart = [replace(one, step=one.step + 3, scale=scale, scaler=other, optimizer=1, others=3) for one in steps]
    [finding] = diagnosed((*scaled, *apart)).findings
    assert finding.evidence == {"skipped": 1, "scale": 32768.0, "iteration": 0}
    assert finding.remedy == ADVICE.format(32768)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("NNNNNN", [("unknown", "forward", None)]),  # a lost loss runs no backward pass
        ("xxxxxx", [("unknown", "backward", None)]),
        ("...NN.xxxxxx", [("unknown", "forward", None), ("unknown", "backward", 0)]),
        ("......", []),
    ],
)
def test_only_finite_losses_have_gradients_for_which_the_script_itself_skips_steps(
    pattern: str, found: list[tuple[str, str, int | None]]
) -> None:
    record = diagnosed([replace(step, scale=1.0) for step in steps_of(pattern)], script=ScriptRun("train.py"))
    assert codes(record) == found
    assert [one.evidence["skipped"] for one in record.findings if one.phase == "backward"] == [6] * ("x" in pattern)


@pytest.mark.parametrize(("is_spoilt", "is_applied", "step"), [(True, True, 2), (True, False, 5), (False, True, None)])
def test_weights_that_no_lost_loss_explains_are_unknown_at_the_first_applied_gradients(
    is_spoilt: bool, is_applied: bool, step: int | None
) -> None:
    spoilt = TensorCounts("parameter", "head.weight", inf=0, nan=4, size=4, first_index=(0,), when="after")
    steps = [replace(one, scale=1.0) for one in steps_of("......")]
    if is_applied:  # an optimizer may leave such gradients out itself, which its finite weights show
        steps[2:] = [replace(one, found_inf=True, groups=(group(0),)) for one in steps[2:]]
    steps[5] = replace(steps[5], nonfinite=(spoilt,) * is_spoilt)
    found = [one for one in diagnosed(steps, script=ScriptRun("train.py")).findings if one.severity == "error"]
    assert [(one.code, one.step) for one in found] == [("unknown", step)] * is_spoilt
    begins = "gradients" if is_applied else "weights"
    assert all(one.message.startswith(f"{begins} are not finite at step {step}, and head.weight") for one in found)


def test_each_optimizer_has_its_own_timeline_and_scale_findings() -> None:
    steps = of_optimizers(steps_of("x.x." + ".x" * 10 + "...."), "01" * 14)
    assert [len(one.steps) for one in record_of(steps).timelines] == [14, 14]
    record = diagnosed(steps)
    assert [(found.code, found.step) for found in record.findings] == [("unknown", 5), ("scale-collapse", 5)]
    alone = of_optimizers(steps_of("x.x" + "." * 25), "01" * 14)
    assert [(found.code, found.evidence["skipped"]) for found in diagnosed(alone).findings] == [
        ("scale-calibration", 2)
    ]


def test_losses_of_two_optimizers_are_not_joined_into_a_rising_curve() -> None:
    steps = losing("." * 12, [*(1.0 + 0.01 * number for number in range(8)), *[900.0] * 4])
    assert [note for note in diagnosed(steps).unseen.notes if "rose" in note]
    apart = of_optimizers(steps, "0" * 8 + "1" * 4)
    assert not [note for note in diagnosed(apart).unseen.notes if "rose" in note]


def test_a_scale_collapse_ends_at_the_last_scale_of_its_own_scaler() -> None:
    falling = [replace(step, scaler=1) for step in steps_of("." * 30 + "x" * 10)]
    apart = [replace(step, step=step.step + 40, scale=1.0, optimizer=1, others=40) for step in steps_of("." * 5)]
    for steps in (falling, (*falling, *apart)):
        collapse = diagnosed(steps).findings[1]
        assert collapse.message == "the loss scale keeps falling, from 65,536 to 128"


def test_one_skip_after_every_growth_is_healthy() -> None:
    pattern = "xx" + ("." * 10 + "x") * 12 + "." * 5
    steps = steps_of(pattern, interval=10)
    assert sum(step.skipped for step in steps) == 14
    assert [scaling.lows for scaling in scalings(record_of(steps))] == [[]]
    assert diagnosed(steps).verdict == "healthy"


@pytest.mark.parametrize(
    ("pattern", "interval", "tries"),
    [
        (".x" * 20, 1, 20),
        ("xxxx" + ".x" * 20, 1, 20),  # the scale settles first
        (".x.xx." * 8 + ".", 1, 16),  # the limit moves with the batch
        ("..x" * 20, 2, 20),
    ],
)
def test_a_scale_that_grows_every_few_steps_and_skips_often_oscillates(pattern: str, interval: int, tries: int) -> None:
    record = diagnose(record_of(steps_of(pattern, interval)))
    [finding] = record.findings
    assert (finding.code, finding.severity, record.verdict) == ("scale-oscillation", "warning", "other")
    assert finding.evidence == {"skipped": tries, "growth_interval": interval}
    assert f"(growth_interval={interval}), and {tries} of {len(pattern)} steps were skipped" in finding.message
    assert headline(record).sentence.startswith("The loss scale grows too often: ")


def test_alternating_scales_without_a_taken_step_are_no_oscillation_and_nonfinite_losses_no_restart() -> None:
    steps = [replace(step, scale=65536.0 if step.step % 2 else 131072.0) for step in steps_of("x" * 30)]
    for one in (steps, scalers_of(*["NNN"] * 10, loss=math.nan)):
        assert [finding.code for finding in diagnosed(one).findings] == ["unknown", "scale-collapse"]


def scalers_of(*patterns: str, loss: float = 1.0) -> list[Step]:
    """The steps of successive scalers, from one string each."""
    steps: list[Step] = []
    for scaler, pattern in enumerate(patterns, start=1):
        made = [replace(step, step=len(steps) + step.step, scaler=scaler, loss=loss) for step in steps_of(pattern)]
        steps += [replace(made[0], succeeds=scaler - 1), *made[1:]]
    return steps


@pytest.mark.parametrize(
    ("patterns", "severity", "skipped", "says"),
    [
        (["xxx."] * 10, "warning", 27, "every 4 steps; 27 of 40 steps were skipped"),
        (["xxxxxx" + "." * 14] * 5, "warning", 24, "a new one, at a loss scale of 65,536, every 20 steps"),
        (["xxxx"] * 10, "error", 36, "every 4 steps; 36 of 40 steps were skipped"),
        (["x"] * 20, "error", 19, "every step; 19 of 20 steps were skipped"),
    ],
)
def test_new_scalers_that_each_skip_until_they_settle_are_a_scale_restart(
    patterns: list[str], severity: str, skipped: int, says: str
) -> None:
    record = diagnose(record_of(scalers_of(*patterns)))
    [finding] = record.findings
    assert (finding.code, finding.severity, record.verdict) == ("scale-restart", severity, "other")
    assert finding.evidence == {"skipped": skipped, "scalers": len(patterns)}
    assert says in finding.message
    assert ("GradScaler(init_scale=" in finding.remedy) is (severity == "warning")
    assert headline(record).sentence.startswith("The loss scale starts over too often: ")


@pytest.mark.parametrize(
    "steps",
    [
        scalers_of("xx" + "." * 40, "xx" + "." * 40, "x" + "." * 40),
        [replace(step, succeeds=0) for step in scalers_of(*["xxxx" + "." * 8] * 5)],  # the folds of a cross-validation
        scalers_of("xxxxxxxxxx" + "." * 30, "." * 30),  # only the first has to settle
        [replace(step, scaler=1 + step.step % 2) for step in steps_of("x" * 12 + "." * 28)],  # two alternating scalers
    ],
)
def test_few_skips_of_later_scalers_folds_and_alternating_scalers_are_healthy(steps: list[Step]) -> None:
    assert diagnosed(steps).verdict == "healthy"


def test_gradients_infinite_at_every_scale_blame_an_op_that_reaches_gradients() -> None:
    """A matcher computes without gradients: its inf may change the matched boxes, but makes no gradient inf."""
    matcher = replace(OVERFLOWS, phase="forward", module="matcher", fp32_largest=9e4)
    layer = replace(OVERFLOWS, module="layer", fp32_largest=2e5, reaches_gradients=True)
    for producers, blamed in (((matcher, layer), ("layer", "gradient-overflow")), ((matcher,), ("matcher", None))):
        at_one = low(scale=1.0, producers=producers)
        found = diagnosed(
            "x" * 8, gradient_investigation(4, low(producers=producers), FP32, low(scale=256.0), at_one)
        ).findings[0]
        assert (found.module, found.code) == (blamed[0], blamed[1] or "forward-overflow")


def test_the_growth_interval_is_correct_if_a_long_run_omits_healthy_steps() -> None:
    steps = steps_of("...x" * 30, 3)
    kept = [step for step in steps if step.skipped or step.step < 20 or step.step % 4 != 1]
    [finding] = diagnosed(kept).findings
    assert (finding.code, finding.evidence["growth_interval"]) == ("scale-oscillation", 3)


def test_a_scale_that_grows_often_but_falls_is_a_collapse_and_not_an_oscillation() -> None:
    record = diagnose(record_of(steps_of(".x" * 5 + ".xxx" * 15, 1)))
    assert [code for code, *_ in codes(record)] == ["unknown", "scale-collapse"]


@pytest.mark.parametrize(
    "pattern",
    [
        "." * 100 + "x.....x....x...x..x.x",
        "x" * 30,
        "." * 40 + "xxxxx",
        "x.x.x.x.x.x.x.x.x.x.x.xx",
        "." * 25 + "x" * 17,
    ],
)
def test_a_scale_that_keeps_falling_is_a_collapse_and_not_calibration(pattern: str) -> None:
    record = diagnosed(pattern)
    assert record.verdict == "inconclusive"
    assert codes(record) == [("unknown", "backward", None), ("scale-collapse", "backward", 0)]


def test_frequent_skips_up_to_the_end_are_not_called_normal_without_a_replay() -> None:
    untold = diagnosed("xx..x...xx..x..")
    [finding] = untold.findings
    assert (finding.code, untold.verdict, finding.remedy) == ("scale-calibration", "inconclusive", "")
    assert "normal" not in finding.message + headline(untold).sentence
    assert finding.message.endswith(". No replay compared steps 4, 8, 9 and 1 more with FP32")
    # Many later steps without a skip explain the skips, and so does a replay.
    assert diagnosed("xx..x...xx..x.." + "." * 30).verdict == "healthy"
    first = low(scale=16384.0, gradients=())
    made = gradient_investigation(4, first, FP32, cured(first, 4096.0), reproduced=1)
    assert diagnosed(untold.steps, made).verdict == "healthy"


@pytest.mark.parametrize("pattern", ["x" * 11 + ".", "x" * 5 + "....", "x" * 16 + "." * 40])
def test_half_of_all_steps_lost_or_a_scale_of_1_is_not_healthy_unless_compared(pattern: str) -> None:
    record = diagnosed([with_nan_only(step) if step.step < 5 else step for step in steps_of(pattern)])
    (found,) = record.findings
    assert (found.code, found.severity, record.verdict) == ("scale-calibration", "info", "inconclusive")
    assert headline(record).sentence.startswith("Inconclusive: ")
    assert found.evidence["unexplained"] == [step.step for step in record.steps if step.skipped]
    assert "do no harm" not in found.message
    said = "healthy models lose fewer steps, and need no loss scale so low. No replay compared steps 0, 1, 2 and "
    assert said in found.message
    assert diagnosed(pattern).verdict == "inconclusive"
    made = gradient_investigation(4, low(scale=4096.0), FP32, cured(low(), 1.0), reproduced=1)
    assert diagnosed(pattern, made).verdict == "healthy"


def test_a_static_scale_that_is_too_large_is_reported_without_an_op() -> None:
    made = gradient_investigation(0, low(), FP32, cured(low(), 16384.0))
    static = {"precision": {"level": "O1", "loss_scale": 65536.0}}
    steps = [replace(step, scale=65536.0) for step in steps_of("x" * 8)]
    [finding] = diagnosed(steps, made, config=static).findings
    assert (finding.code, finding.severity) == ("scale-calibration", "error")
    assert finding.message.startswith("the static loss scale 65,536 is too large for the gradients of this step: ")


def test_the_skipped_step_with_the_fewest_groups_names_the_module() -> None:
    steps = list(steps_of("." * 30 + "xxxxxx", hit=(0, 1, 2)))
    steps[33] = replace(steps[33], groups=(group(0), group(1)))
    root = diagnosed(steps).findings[0]
    assert root.module == "block1.0.attn"
    assert root.evidence["narrowest_step"] == 33
    assert root.evidence["groups"] == list(GROUPS[:2])


def test_a_static_scale_is_not_a_scale_collapse() -> None:
    steps = [replace(step, scale=1024.0) for step in steps_of("x" * 10)]
    assert codes(diagnosed(steps)) == [("unknown", "backward", None)]


@pytest.mark.parametrize(("before", "first"), [("...", 3), ("..x...", 6)])
def test_the_first_nonfinite_loss_is_the_root_of_a_falling_scale(before: str, first: int) -> None:
    record = diagnosed(before + "N" * 12)
    assert codes(record) == [("unknown", "forward", None), ("scale-collapse", "backward", 0)]
    assert record.findings[0].step == first
    assert record.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("mark", "found"), [("N", ["unknown", "scale-collapse"]), ("x", ["gradient-overflow", "scale-runaway"])]
)
def test_a_scale_lowered_by_nan_losses_does_not_blame_a_gradient_that_a_lower_scale_cures(
    mark: str, found: list[str]
) -> None:
    first = low(producers=(OVERFLOWS,))
    made = gradient_investigation(30, first, FP32, cured(first, 32768.0), reproduced=1)
    steps = steps_of("." * 30 + "x" + "." * 30 + mark * 20 + ".")
    assert steps[-1].scale < 1.0
    assert [code for code, *_ in codes(diagnosed(steps, made))] == found


@pytest.mark.parametrize(
    ("factor", "code"), [(2.0, "gradient-growth"), (8.0, "gradient-growth"), (32.0, "gradient-overflow")]
)
def test_skips_are_gradient_growth_if_three_halvings_of_the_scale_cure_the_step(factor: float, code: str) -> None:
    first = low(producers=(OVERFLOWS,))
    made = gradient_investigation(30, first, FP32, cured(first, 65536.0 / factor), reproduced=1)
    record = diagnosed("." * 30 + 3 * ("x" + "." * 20), made)
    assert record.findings[0].code == code
    assert (record.verdict == "healthy") == (code == "gradient-growth")


def test_infinite_losses_without_skips_are_found_and_have_verdict_other_at_o0() -> None:
    record = diagnosed("I" * 10)
    assert codes(record) == [("unknown", "forward", None)]
    assert record.findings[0].evidence["steps_not_skipped"] == 10
    assert diagnosed("I" * 10, config={"precision": {"level": "O0", "dtype": "float16"}}).verdict == "other"


def with_tensor(pattern: str, step: int, *tensor: object) -> tuple[Step, ...]:
    """Steps as from ``steps_of``, one of which has a non-finite tensor."""
    steps = list(steps_of(pattern))
    steps[step] = replace(steps[step], nonfinite=(TensorCounts(*tensor),))  # type: ignore[arg-type]
    return tuple(steps)


BAD_BATCH = ("batch", "[0]", 0, 2, 64, (5, 1))


def test_a_nonfinite_batch_explains_the_nan_loss_of_its_step() -> None:
    record = diagnosed(with_tensor("....N....", 4, *BAD_BATCH))
    assert record.verdict == "other"
    assert codes(record) == [("data-nonfinite", "data", None)]
    assert "sample 5" in record.findings[0].message


@pytest.mark.parametrize(("dtype", "verdict"), [("float16", "inconclusive"), ("bfloat16", "other"), ("", "other")])
def test_nonfinite_values_in_a_float16_batch_tensor_are_inconclusive(dtype: str, verdict: str) -> None:
    record = diagnosed(with_tensor("....N....", 4, *BAD_BATCH, "before", False, dtype))
    assert record.verdict == verdict
    is_known = verdict == "other"
    assert codes(record) == [("data-nonfinite", "data", None) if is_known else ("unknown", "forward", None)]
    assert ("in that float16 tensor" in record.findings[0].message) == (not is_known)


@pytest.mark.parametrize("script", [None, ScriptRun("train.py")])
def test_nan_losses_after_a_bad_batch_are_a_separate_finding_only_without_a_script(script: ScriptRun | None) -> None:
    found = [code for code, _, _ in codes(diagnosed(with_tensor("..NNN", 2, *BAD_BATCH), script=script))]
    assert found[:1] == ["data-nonfinite"]
    assert ("unknown" in found) == (script is None)


@pytest.mark.parametrize(("code", "told"), [("misuse-no-scaler", ""), ("misuse-clip-scaled", ", at 5 calls")])
def test_only_a_misuse_with_counted_calls_states_their_number(code: str, told: str) -> None:
    (found,) = diagnose(record_of(steps_of("....."), misuses=(Misuse(code, 0, 5),))).findings
    assert found.message.endswith(told)
    assert ("at 5 calls" in found.message) == bool(told)


def test_nonfinite_weights_before_a_step_are_the_root_finding() -> None:
    record = diagnosed(with_tensor("N" * 6, 0, "parameter", "head.weight", 1, 0, 4, (0,)))
    assert record.verdict == "other"
    assert [code for code, _, _ in codes(record)] == ["weights-nonfinite", "scale-collapse"]
    assert record.findings[0].parameter == "head.weight"


def test_weights_that_an_unskipped_step_corrupts_are_not_blamed_for_that_step() -> None:
    record = diagnosed(with_tensor("..I", 2, "parameter", "head.weight", 1, 0, 4, (0,), "after"))
    assert codes(record) == [("unknown", "forward", None)]


def test_a_poisoned_buffer_is_found_although_every_loss_is_finite() -> None:
    record = diagnosed(with_tensor(".....", 4, "buffer", "bn.running_var", 1, 0, 4, (0,), "after"))
    assert codes(record) == [("buffer-poisoned", "forward", None)]
    assert record.findings[0].module == "bn"
    # Healthy steps are not inspected before the end, so the step that wrote it is unknown.
    assert "after step 4, whose own loss is finite; an overflow, inf" in record.findings[0].message
    assert headline(record).sentence.startswith("A buffer is non-finite in bn after step 4")


@pytest.mark.parametrize(("pattern", "step"), [(".....", 4), ("..x..", 2)])
@pytest.mark.parametrize(("inf", "nan"), [(1, 0), (0, 1)])
def test_a_nonfinite_custom_buffer_without_a_nonfinite_loss_is_information(
    pattern: str, step: int, inf: int, nan: int
) -> None:
    record = diagnosed(with_tensor(pattern, step, "buffer", "net.best", inf, nan, 1, (), "after"))
    found = record.findings[0]
    assert (record.verdict, found.code, found.severity, found.remedy) == ("healthy", "buffer-poisoned", "info", "")
    assert found.message.startswith(
        f"buffer net.best holds 1 {'inf' if inf else 'NaN'} among 1 values after step {step},"
    )
    skips = f"{pattern.count('x') or 'none'} of 5 steps skipped"
    assert headline(record).sentence == f"Healthy: {skips}; a buffer in net holds inf or NaN, which no loss shows."


def test_a_nonfinite_buffer_is_an_error_after_a_nan_loss_or_an_overflowing_op() -> None:
    tensor = ("buffer", "net.best", 1, 0, 1, (), "after")
    lost = diagnosed(with_tensor("..N..", 2, *tensor))
    (poisoned,) = [finding for finding in lost.findings if finding.code == "buffer-poisoned"]
    assert poisoned.severity == "error"
    assert "after step 2 and stays so" in poisoned.message
    (shown,) = diagnosed(with_tensor(".....", 4, *tensor), replace(overflowing(4), why="end")).findings
    assert (shown.code, shown.severity, shown.op) == ("buffer-poisoned", "error", "aten.mm.default")


@pytest.mark.parametrize("tensor", [("buffer", "mask", 6, 0, 16), ("parameter", "mask", 6, 0, 16, (), "before", True)])
@pytest.mark.parametrize("pattern", ["....", "xx.."])
def test_an_infinite_mask_is_not_reported_if_a_step_is_healthy(tensor: tuple[object, ...], pattern: str) -> None:
    record = diagnosed(with_tensor(pattern, 0, *tensor))
    assert record.verdict == "healthy"
    assert [finding.code for finding in record.findings] == ["scale-calibration"] * ("x" in pattern)
    lost = diagnosed(with_tensor("N" * 8, 0, *tensor))
    assert lost.findings[0].code == "weights-nonfinite"  # no evidence that it is intended


@pytest.mark.parametrize(("inf", "nan", "frozen"), [(1, 0, False), (0, 1, True)])
def test_inf_in_a_trained_parameter_and_nan_in_a_frozen_parameter_are_warnings(
    inf: int, nan: int, frozen: bool
) -> None:
    record = diagnosed(with_tensor("....", 0, "parameter", "head.weight", inf, nan, 4, (), "before", frozen))
    assert [(found.code, found.severity) for found in record.findings] == [("weights-nonfinite", "warning")]


def overflowing(step: int) -> Investigation:
    producer = Producer("forward", "head", 0, "aten.mm.default", None, "float16", 300.0, 9.0, 1, 0, 4, fp32_largest=9e5)
    return Investigation(step, "loss", low(loss=math.nan, grad_norm=math.nan, producers=(producer,)), FP32)


@pytest.mark.parametrize(
    "code", ["misuse-clip-scaled", "misuse-no-update", "misuse-bare-step", "misuse-gradient-penalty"]
)
def test_an_overflow_follows_only_from_misuses_that_can_cause_it(code: str) -> None:
    record = record_of(steps_of("..N."), investigations=(overflowing(2),), misuses=(Misuse(code, 0),))
    found = [(finding.code, finding.root) for finding in diagnose(record).findings]
    if code in ("misuse-clip-scaled", "misuse-no-update"):
        assert found == [("forward-overflow", None), (code, None)]
    else:
        assert found == [(code, None), ("forward-overflow", 0)]


@pytest.mark.parametrize("spoilt", [1, 2, 5])
def test_an_overflow_does_not_follow_from_weights_that_turn_nonfinite_later(spoilt: int) -> None:
    steps = with_tensor("..NNNNNN", spoilt, "parameter", "head.weight", 0, 1, 4, (0,))
    record = diagnosed(steps, overflowing(2))
    found = [(finding.code, finding.root) for finding in record.findings]
    if spoilt > 2:
        assert found[:2] == [("forward-overflow", None), ("weights-nonfinite", 0)]
    else:
        assert found[0] == ("weights-nonfinite", None)
        assert ("forward-overflow", None) not in found


@pytest.mark.parametrize("pattern", ["..N.", "..x."])
def test_a_misuse_comes_first_if_no_replay_shows_a_cause(pattern: str) -> None:
    record = diagnose(record_of(steps_of(pattern), misuses=(Misuse("misuse-clip-scaled", 0),)))
    assert (record.findings[0].code, record.verdict) == ("misuse-clip-scaled", "other")


def test_two_misuses_are_listed_together_after_an_overflow() -> None:
    both = (Misuse("misuse-clip-scaled", 0), Misuse("misuse-no-update", 0))
    record = diagnose(record_of(steps_of("..Nxxxxxxx"), investigations=(overflowing(2),), misuses=both))
    found = [(finding.code, finding.root) for finding in record.findings]
    assert found[:3] == [("forward-overflow", None), ("misuse-clip-scaled", None), ("misuse-no-update", 1)]
    assert all(root == 0 for _, root in found[3:])


@pytest.mark.parametrize("code", ["mask-constant", "misuse-bce", "misuse-half-parameters"])
def test_an_autocast_error_is_a_finding_with_its_source_and_first_line(code: str) -> None:
    source = Source("model.py", 3, "forward", "x.masked_fill(mask, -1e9)")
    record = diagnose(record_of((), autocast_error=AutocastError(code, 0, "value cannot\nbe converted", source)))
    assert record.verdict == "other"
    [finding] = record.findings
    assert (finding.code, finding.source, finding.message) == (code, source, "value cannot")


def test_an_autocast_error_with_a_code_of_another_version_is_read_like_unknown() -> None:
    error = AutocastError("misuse-of-later", 0, "value cannot be converted")
    record = diagnose(record_of(steps_of("."), autocast_error=error, script=ScriptRun("train.py")))
    assert [(one.code, one.severity, one.remedy) for one in record.findings] == [
        ("misuse-of-later", "error", "compare with a run in FP32: autocast(enabled=False)")
    ]
    assert (record.verdict, diagnose(record)) == ("inconclusive", record)
    shown = next_command(record, CommandContext("", ""))
    assert shown is not None
    assert shown.command == "ampdbg explain unknown"


def test_an_overflow_in_a_skipped_last_step_is_not_a_silent_overflow() -> None:
    made = Investigation(2, "end", low(producers=(OVERFLOWS,), lost_energy=0.0), FP32)
    assert codes(diagnosed("..x", made)) == [("scale-calibration", "backward", None)]


FLOOR = replace(FP32, rounded=True, gradient_distance=0.01)


@pytest.mark.parametrize(
    ("distance", "is_erased", "floor", "found"),
    [
        (0.04, False, None, ("silent-overflow", "info")),
        (0.12, False, None, ("silent-overflow", "warning")),
        (0.12, True, None, ("silent-overflow", "info")),
        (0.9, False, FLOOR, ("silent-overflow", "error")),
        (0.9, True, FLOOR, ("precision-loss", "error")),
    ],
)
def test_an_erased_overflow_is_information_and_does_not_hide_precision_loss(
    distance: float, is_erased: bool, floor: Replay | None, found: tuple[str, str]
) -> None:
    producer = replace(OVERFLOWS, is_erased=is_erased)
    finite = low(grad_norm=1.0, gradients=(), producers=(producer,), gradient_distance=distance, lost_energy=0.0)
    made = Investigation(2, "end", finite, FP32, floor=floor, loss=1.0)
    assert [(one.code, one.severity) for one in diagnosed("...", made).findings] == [found]


CHOICE = replace(OVERFLOWS, phase="forward", op="aten.index.Tensor", inf=0, finite_in_fp32=True)


@pytest.mark.parametrize(
    ("loss", "distance", "noise", "severity"),
    [
        (1.01, 0.88, 0.1, "info"),  # the loss agrees
        (1.06, 0.88, 0.49, "info"),  # rounding the weights leads as far
        (1.06, 0.88, 0.24, "error"),
        (1.06, 2.1, 0.49, "error"),
        (1.06, 0.88, 0.1, "error"),
    ],
)
def test_another_choice_is_information_where_the_loss_agrees_or_rounding_weights_leads_as_far(
    loss: float, distance: float, noise: float, severity: str
) -> None:
    finite = low(loss=loss, grad_norm=1.0, gradients=(), gradient_distance=distance, lost_energy=0.0)
    floor = replace(FP32, rounded=True, gradient_distance=noise)
    made = Investigation(2, "end", finite, FP32, floor=floor, loss=loss, choice=CHOICE, first_far=CHOICE)
    assert [(one.code, one.severity) for one in diagnosed("...", made).findings] == [("precision-loss", severity)]


@pytest.mark.parametrize("is_erased", [False, True])
def test_an_erased_overflow_is_not_the_cause_of_infinite_gradients(is_erased: bool) -> None:
    first = replace(OVERFLOWS, is_erased=is_erased)
    last = replace(OVERFLOWS, module="body", parameter="body.weight")
    made = Investigation(2, "gradients", low(gradients=("body.weight",), producers=(first, last)), FP32)
    assert diagnosed("..x", made).findings[0].module == ("body" if is_erased else "head")


@pytest.mark.parametrize(
    ("changes", "says", "remedy"),
    [
        ({"inf": 3}, "exceed FP32's range", "logsumexp"),
        (
            {"op": "aten.log.default", "inf": 3, "divides_by_zero": True},
            "it takes the logarithm of a value that FP32 rounds to zero, not only FP16",
            "clamp it where it is made",
        ),
        ({"inf": 3, "divides_by_zero": True}, "it divides by a value that FP32 rounds to zero", "change the formula"),
        ({"nan": 3}, "rounds too coarsely", "divides or cancels"),
        ({"inf": 3, "input_largest": 1e20}, "exceed FP32's range", "bring these values down"),
    ],
)
def test_a_step_that_is_finite_only_in_fp64_names_fp32s_range_or_rounding(
    changes: dict[str, Any], says: str, remedy: str
) -> None:
    begins = Producer("forward", "head", 0, "aten.exp.default", None, "float32", 114.0, 1.0, 0, 0, 4)
    lost = replace(FP32, loss=math.nan, grad_norm=math.nan)
    replays = (replace(lost, dtype="float16"), replace(lost, producers=(replace(begins, **changes),)))
    made = Investigation(2, "loss", *replays, replace(FP32, dtype="float64"), loss=math.nan)
    found = diagnosed("..I", made).findings[0]
    assert found.code == "unknown"
    assert says in found.message
    assert remedy in found.remedy


def test_a_record_without_steps_or_errors_has_no_findings() -> None:
    assert diagnosed(()).findings == ()


def test_an_overflow_does_not_follow_from_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(code: str, step: int) -> Finding:
        return Finding(code, "error", step, "forward", "it fails", "repair it")

    later, earlier, collapse = found("forward-overflow", 9), found("gradient-overflow", 3), found("scale-collapse", 3)
    collapse = replace(collapse, root=0)
    family = diagnosis.Family("any", lambda record: iter((later, earlier, collapse)))
    monkeypatch.setattr(diagnosis, "ORDER_OF_DECISION", [family])
    assert [finding.root for finding in diagnosed(()).findings] == [None, None, 1]
    later = replace(later, step=2)
    assert [finding.root for finding in diagnosed(()).findings] == [None, 0, 0]


@pytest.mark.parametrize(("steps", "begins"), [("N" * 26, 0), ("xx" + "." * 40 + "N" * 20, 42)])
def test_a_scale_collapse_begins_at_the_first_of_its_consecutive_skips(steps: str, begins: int) -> None:
    (collapse,) = (found for found in diagnosed(steps).findings if found.code == "scale-collapse")
    assert collapse.step == begins


def test_an_overflow_in_a_later_step_does_not_follow_from_a_skipped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    withheld = Finding("gradient-overflow", "error", 2, "backward", "it fails", op="mul")
    silent = Finding("silent-overflow", "error", 4, "forward", "it fails", op="exp")
    in_it, falls = replace(silent, step=2), Finding("scale-collapse", "error", 4, "backward", "it falls")
    family = diagnosis.Family("any", lambda record: iter((withheld, silent, in_it, falls)))
    monkeypatch.setattr(diagnosis, "ORDER_OF_DECISION", [family])
    assert [finding.root for finding in diagnosed("..x..").findings] == [None, None, 0, 0]
    assert [finding.root for finding in diagnosed(".....").findings] == [None, 0, 0, 0]  # step 2 updated the weights


def test_a_divergence_is_reported_once_at_the_first_step_that_shows_it() -> None:
    steps = losing("....x.I", [2, 3, 2, 3, 900, 800, math.inf])
    replays = low(scale=1.0, loss=math.inf), replace(FP32, loss=900.0)
    later = Investigation(6, "loss", *replays, continuation=(7e8, math.inf))
    earlier = Investigation(4, "gradients", *replays, continuation=(900.0, 7e8, math.inf))
    for order in ((earlier, later), (later, earlier)):
        record = diagnosed(steps, *order)
        assert codes(record) == [("divergence", "backward", None)]
        assert record.findings[0].step == 4
        assert "rose from 2 to 900" in record.findings[0].message
        assert record.verdict == "other"


def test_losses_of_zero_at_first_do_not_make_later_losses_a_rise() -> None:
    def noted(*losses: float) -> tuple[str, ...]:
        return diagnosed(losing("." * len(losses), losses)).unseen.notes

    assert noted(*[0.0] * 10, 1.4, 1.5, 1.4, 1.5) == ()  # a discriminator that starts late
    assert ["from 1.5 to 2,000" in note for note in noted(*[0.0] * 10, 1.4, 1.5, 1e3, 2e3)] == [True]


def test_a_loss_summed_over_more_and_more_passes_has_not_risen() -> None:
    def noted(*of_a_pass: float) -> tuple[str, ...]:
        passes = [1, 1, 2, 4, 8, 16, 16, 16]
        summed = zip(steps_of("........"), of_a_pass, passes, strict=True)
        return diagnosed([replace(step, loss=one * count, passes=count) for step, one, count in summed]).unseen.notes

    assert noted(1.0, 1.1, 1.0, 0.9, 1.0, 1.1, 0.9, 1.0) == ()
    assert len(noted(1.0, 1.1, 1.0, 0.9, 30.0, 31.0, 32.0, 33.0)) == 1


@pytest.mark.parametrize(("later", "verdict"), [(5e3, "inconclusive"), (5e2, "healthy")])
def test_a_run_whose_loss_stays_a_thousandfold_above_the_first_is_inconclusive(later: float, verdict: str) -> None:
    steps = [replace(step, loss=later if step.step else 2.0) for step in steps_of("." * 20)]
    record = diagnosed(steps)
    assert (record.verdict, record.findings) == (verdict, ())
    assert any("stays there" in note for note in record.unseen.notes) == (verdict == "inconclusive")


def test_losses_of_zero_at_first_do_not_make_later_losses_a_divergence() -> None:
    def found(*losses: float) -> tuple[str, str]:
        replays = low(scale=1.0, loss=math.inf), replace(FP32, loss=math.inf, gradients=("weight",))
        record = diagnosed(losing("....x", losses), Investigation(4, "gradients", *replays))
        return record.findings[0].code, record.findings[0].message

    assert "divergence" not in found(0.0, 0.0, 1.4, 1.5, 1.4)
    assert found(1.3, 1.4, 900.0, 1e3, 900.0)[0] == "divergence"


@pytest.mark.parametrize("script", [None, ScriptRun("train.py")])
def test_a_divergence_of_the_initial_weights_does_not_claim_that_the_loss_rose(script: ScriptRun | None) -> None:
    steps = losing("xxx.N", [1.349, 1.744, 1.999, 2.1, math.nan])
    gradients, fp32 = low(scale=1.0, loss=1.999), replace(FP32, loss=1.999)
    lost = low(scale=1.0, loss=math.nan, grad_norm=math.nan)
    first = Investigation(2, "gradients", gradients, fp32, continuation=(1.999, 9e6, 4e9))
    later = Investigation(4, "loss", lost, replace(lost, dtype="float32"), loss=math.nan)
    record = diagnosed(steps, first, later, script=script)
    found = [finding for finding in record.findings if finding.code == "divergence"]
    assert [(finding.step, finding.message) for finding in found] == [
        (2, "the loss is 1.999, and steps in FP32 on the same batch lead to 4e9")
    ]


def batch_beyond_half(step: int, leaf: str | None, largest: float = 1.5e6, **fields: Any) -> Investigation:
    """A step whose batch is too large for half; without a leaf, another value is."""
    op = "aten._to_copy.default"
    cast = Producer("forward", "", 0, op, None, "float16", largest, 9.0, 1, 0, 4, fp32_largest=largest, leaf=leaf)
    lost = low(loss=math.nan, grad_norm=math.nan, gradients=(), producers=(cast,))
    size = {"[0]": largest if leaf else 1.0}
    return replace(Investigation(step, "loss", lost, FP32, batch_largest=size), **fields)


def test_a_batch_out_of_range_is_reported_at_its_own_step_after_a_skip() -> None:
    record = record_of(steps_of("..xN."), investigations=(batch_beyond_half(3, "[0]"),), script=ScriptRun("train.py"))
    assert [(one.code, one.step) for one in diagnose(record).findings[:1]] == [("data-range", 3)]
    other = replace(record, investigations=(overflowing(3),))
    # The step before has a finite loss, so it failed in another way: only non-finite losses continue a sequence.
    assert [(one.code, one.step) for one in diagnose(other).findings[:1]] == [("forward-overflow", 3)]
    other = replace(other, steps=steps_of("..NN."))
    assert [(one.code, one.step) for one in diagnose(other).findings[:1]] == [("forward-overflow", 2)]


@pytest.mark.parametrize(
    ("pattern", "replayed", "optimizers", "first"),
    [
        ("N.N.N.N", 4, "0101010", 0),  # critic and actor alternate
        ("N..N..N", 6, "0110110", 0),
        ("..N..NN", 5, "0000000", 5),  # a taken step of the same optimizer is in between
        ("..N..NN", 6, "0010011", 2),
        ("..N.N..", 4, "0001000", 2),
        ("..N.N..", 4, "0000000", 4),
        ("x.N.x..", 2, "0101010", 2),
    ],
)
def test_a_failure_begins_at_the_first_of_an_optimizers_consecutive_nan_losses(
    pattern: str, replayed: int, optimizers: str, first: int
) -> None:
    steps = of_optimizers(steps_of(pattern), optimizers)
    record = diagnosed(steps, overflowing(replayed), script=ScriptRun("train.py"))
    found = record.findings[0]
    assert (found.code, found.step) == ("forward-overflow", first)
    assert (f"step {replayed} was replayed, and every step from {first} on" in found.message) == (first != replayed)


@given(pattern=st.text(alphabet=".xNI", max_size=80), interval=st.integers(1, 30))
@example(pattern=".xxxx", interval=1)
def test_every_record_gets_a_consistent_diagnosis(pattern: str, interval: int) -> None:
    record = record_of(steps_of(pattern, interval))
    found = diagnose(record)
    assert diagnose(found) == found
    assert all(step.skipped for scaling in scalings(record) for step in scaling.lows)
    is_sound = all(finding.severity == "info" for finding in found.findings)
    is_told = not any(MANY_UNEXPLAINED in finding.evidence for finding in found.findings)
    assert (found.verdict == "healthy") == (is_sound and is_told and not record.took_no_step)
    assert all(finding.root is None or finding.root < index for index, finding in enumerate(found.findings))
    assert not found.findings or found.findings[0].root is None
    if "N" in pattern or "I" in pattern:
        assert found.verdict == "inconclusive"


@pytest.mark.parametrize("wrong", [None, {}, "r.json"])
def test_diagnose_rejects_an_argument_that_is_not_a_record(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^got a \w+ instead of a Record; allowed: diagnose\(record\); ampdbg.scan"):
        diagnose(wrong)


def test_if_no_scale_is_finite_the_op_that_overflows_at_the_lowest_scale_is_named() -> None:
    """The op that overflows only at 32,768 fits at 1, where another op makes the gradients non-finite."""
    head, stem = (replace(OVERFLOWS, module=name, fp32_largest=at) for name, at in (("head", 27.5), ("stem", 1e6)))
    first = low(scale=32768.0, producers=(head, stem))
    between, lowest = replace(first, scale=16384.0, producers=()), replace(first, scale=1.0, producers=(stem,))
    steps = [replace(step, scale=32768.0 / 2**step.step) for step in steps_of("x" * 12)]
    made = gradient_investigation(1, first, FP32, between, lowest, reproduced=1)
    found = diagnosed(steps, made).findings[0]
    assert (found.code, found.module) == ("gradient-overflow", "stem")
    # If a lower scale is finite, the op that overflows at the step's own scale is the culprit.
    suspect = culprit(replace(made, at_lower=(between, cured(lowest, 1.0))))
    assert suspect is not None
    assert suspect.producer.module == "head"


@pytest.mark.parametrize(
    ("skipped", "found"),
    [
        (17, [("scale-calibration", "backward", None)]),
        (19, [("scale-calibration", "backward", None)]),
        (20, [("unknown", "backward", None), ("scale-collapse", "backward", 0)]),
    ],
)
def test_a_scale_far_below_the_one_that_cures_a_step_has_an_unknown_cause(
    skipped: int, found: list[tuple[str, str, int | None]]
) -> None:
    """Replays of step 1 are finite at 1, and other batches may need scales down to 0.25."""
    first = low(scale=32768.0, producers=(OVERFLOWS,))
    record = diagnosed("x" * skipped, gradient_investigation(1, first, FP32, cured(first, 1.0), reproduced=1))
    assert (codes(record), record.verdict) == (found, "inconclusive")
    assert record.findings[0].op == ""
    assert exit_code(record, "warning") == int(skipped == 20)


@pytest.mark.parametrize(
    ("changes", "survives", "code"),
    [
        ({}, True, "gradient-overflow"),
        ({"fp32_largest": None}, True, "gradient-overflow"),
        ({"nan": 1}, True, "unknown"),
        ({}, False, "unknown"),
    ],
)
def test_a_gradient_that_a_lower_scale_cures_is_an_overflow_even_if_fp32s_is_small(
    changes: dict[str, Any], survives: bool, code: str
) -> None:
    """The forward pass in half is far from FP32's there, and its gradients are larger."""
    made_inf = replace(OVERFLOWS, **{"fp32_largest": 0.5, **changes})
    first = low(scale=32768.0, producers=(made_inf,))
    finite = cured(first, 16384.0, gradient_distance=0.9)
    lower = finite if survives else replace(first, scale=16384.0, producers=())
    made = gradient_investigation(1, first, FP32, lower, reproduced=1)
    finding = Evidence(made, record_of(steps_of("..x"), investigations=(made,))).cause
    assert (finding.code, finding.module) == (code, "head")
    assert ("exceeds FP16's limit of 65,504 at a loss scale of 32,768" in finding.message) == (code != "unknown")
    reaches = "where FP32 reaches only 16,384; at a loss scale of 16,384 the whole step is finite"
    assert (reaches in finding.message) == (code != "unknown" and not changes)


@pytest.mark.parametrize(("leaf", "code"), [("[0]", "data-range"), (None, "unknown")])
def test_a_diverging_learning_rate_is_not_suggested_for_a_batch_out_of_range(leaf: str | None, code: str) -> None:
    made = batch_beyond_half(1, leaf, reach="modules")
    found = diagnosed(".N..", made, script=ScriptRun("train.py")).findings[0]
    assert (found.code, "a diverging learning rate" in found.message) == (code, code == "unknown")


@pytest.mark.parametrize(
    ("leaf", "losses", "grew", "code"),
    [
        ("[0]", (2.26, 2.3, 2.32, 2.31), 0.99, "data-range"),
        ("[0]", (2.26, 2.3, 2.32, 2.31), 1.4, "divergence"),
        ("[0]", (2.26, 2.3, 80.0, 900.0), 0.99, "divergence"),
        (None, (2.26, 2.3, 2.32, 2.31), 0.99, "divergence"),
    ],
)
def test_a_batch_out_of_range_is_not_divergence_although_fp32_climbs_on_it(
    leaf: str | None, losses: tuple[float, ...], grew: float, code: str
) -> None:
    lost = batch_beyond_half(4, leaf, 3e5, continuation=(1086.0, 1.5e9, 1.4e16, math.nan), weights_grew=grew)
    made = replace(lost, fp32=replace(FP32, loss=1086.0, grad_norm=9e4))
    found = diagnosed(losing("....N", (*losses, math.nan)), made, script=ScriptRun("train.py")).findings[0]
    assert (found.code, found.step) == (code, 4)


@pytest.mark.parametrize(
    ("largest", "loss_in_fp32", "code"),
    [(1e6, 2.5e11, "data-range"), (1e6, 3.0, "forward-overflow"), (10.0, 2.5e11, "forward-overflow")],
)
def test_a_batch_out_of_range_is_blamed_if_the_fp32_loss_leaps_and_another_op_overflows(
    largest: float, loss_in_fp32: float, code: str
) -> None:
    """As after a dropout, which turns 1e6 into 2.5e6: the op is not a cast of the batch itself."""
    made = replace(overflowing(4), fp32=replace(FP32, loss=loss_in_fp32), batch_largest={"[0]": largest})
    found = diagnosed("....N", made).findings[0]
    assert (found.code, found.step) == (code, 4)
    leap = "; in FP32 too the loss jumps to 2.5e11, where it was at most 1 before"
    assert (leap in found.message) == (loss_in_fp32 > 3)


def test_an_overflow_after_a_step_from_which_fp32_diverges_is_divergence() -> None:
    steps = losing("....x.N", [2.0, 3.0, 2.0, 3.0, 30.0, 60.0, math.nan])
    early = gradient_investigation(4, low(scale=1.0), replace(FP32, loss=30.0), continuation=(30.0, 7e4, 7e8))
    for investigations, code in (((early, overflowing(6)), "divergence"), ((overflowing(6),), "forward-overflow")):
        found = diagnosed(steps, *investigations).findings[0]
        assert (found.code, found.step) == (code, 4 if code == "divergence" else 6)


@pytest.mark.parametrize(
    ("script", "codes_of_it"),
    [(ScriptRun("train.py"), ["forward-overflow", "data-nonfinite"]), (None, ["data-nonfinite", "forward-overflow"])],
)
def test_a_nonfinite_input_of_a_script_after_an_overflow_is_listed_after_it(
    script: ScriptRun | None, codes_of_it: list[str]
) -> None:
    bad = TensorCounts("batch", "[0]", 0, 3, 9)
    steps = [replace(step, nonfinite=(bad,) * (step.step == 2)) for step in steps_of(".NNN.")]
    record = diagnosed(steps, overflowing(1), script=script)
    assert [finding.code for finding in record.findings[:2]] == codes_of_it
    steps[1], steps[2] = replace(steps[1], nonfinite=(bad,)), replace(steps[2], nonfinite=())
    assert diagnosed(steps, overflowing(3), script=script).findings[0].code == "data-nonfinite"


@pytest.mark.parametrize("cost", [0.0002, 0.0099, 0.011, 0.4])
def test_frozen_weights_are_an_error_at_every_measured_cost(cost: float) -> None:
    still = FrozenParameter("norm.weight", 64, 0, 1.0)
    (found,) = diagnosed("." * 40, updates=Updates(20, lost=0.5, frozen=(still,), cost=cost)).findings
    assert (found.code, found.severity) == ("frozen-weights", "error")
    assert f"that costs {100 * cost:g}% of the loss's fall" in found.message


@pytest.mark.parametrize(("lost", "cost", "is_found"), [(0.39, 0.17, True), (0.39, 0.04, False), (0.1, 0.17, False)])
def test_movement_lost_in_part_is_a_warning_if_it_costs_a_tenth_of_the_fall_of_the_loss(
    lost: float, cost: float, is_found: bool
) -> None:
    found = diagnosed("." * 40, updates=Updates(20, lost=lost, lost_gradient=lost, cost=cost)).findings
    assert [(one.code, one.severity) for one in found] == [("optimizer-underflow", "warning")] * is_found
    assert not found or "By a first-order estimate that costs 17% of the loss's fall" in found[0].message


def test_of_several_stuck_moments_the_finding_names_the_largest_first() -> None:
    stuck = tuple(StuckMoment(name, 0.999, times, True, 40) for name, times in (("a", 5.0), ("b", 9.0)))
    (found,) = diagnosed("." * 40, updates=Updates(20, stuck=stuck)).findings
    assert (found.code, found.parameter, found.evidence["times"]) == ("stuck-moment", "b", 9.0)
    assert found.message.startswith("the second moments of b and a are stuck")
