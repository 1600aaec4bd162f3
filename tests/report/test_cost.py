"""The page of a comparison of levels: headline, table cells, and the next command."""

import math
from dataclasses import replace

import pytest

from ampdbg.record.findings import Finding
from ampdbg.record.run import BatchFit, Costs, LevelCost, Record, StepMemory, Verdict
from tests.report.pages import rendered
from tests.report.records import run

MB = 10**6
HALF = {"float16": 98, "float32": 2}
REASON = (
    "the step function raised RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::Half at "
    "this level the weights are half, and nothing casts what the code computes in float32 for them"
)

FINDING = Finding("forward-overflow", "error", 0, "forward", "bmm overflows", module="blocks.0.attn")

LEVELS = (
    LevelCost(
        "FP32", "O0", "float32", verdict="healthy", steps=30, loss=1.6881, flops={"float32": 100},
        memory=StepMemory(40 * MB, 0, 40 * MB, 80 * MB, 0, 300 * MB), fit=BatchFit(32, (1, 2, 4), is_reckoned=True),
    ),
    LevelCost(
        "O1", "O1", "float16", verdict="precision", finding=FINDING, steps=30, skipped=28,
        loss=float("nan"), flops=HALF, memory=StepMemory(40 * MB, 0, 40 * MB, 80 * MB, 20 * MB, 160 * MB),
        fit=BatchFit(4, (1, 2, 4, 9), why="8 times: out of memory"),
    ),
    LevelCost(
        "O1 with pins", "O1", "float16", pins=("blocks.0.attn",), verdict="healthy", steps=30, skipped=1, loss=1.689,
        apart=0.0012, noise=0.0008, flops=HALF, memory=StepMemory(40 * MB, 0, 40 * MB, 80 * MB, 18 * MB, 170 * MB),
        fit=BatchFit(0, (1,)),
    ),
    LevelCost("O2", "O2", "float16", error=REASON),
    LevelCost(
        "bfloat16", "O1", "bfloat16", verdict="healthy", steps=30, loss=1.75, apart=0.04, noise=0.004,
        flops={"bfloat16": 98, "float32": 2}, memory=StepMemory(40 * MB, 0, 40 * MB, 80 * MB, 20 * MB, 160 * MB),
        fit=BatchFit(2, (1, 2, 4)),
    ),
)  # fmt: skip

ON_CPU = replace(
    run(()), command="cost", planned_steps=30, costs=Costs(LEVELS, batch=32, budget=2 * 10**9, notes=("a note",))
)


def on_gpu() -> Record:
    seconds = {"FP32": 0.1, "O1": 0.05, "O1 with pins": 0.052, "bfloat16": 0.051}
    levels = (
        replace(one, seconds=seconds.get(one.name), peak=one.memory.total + MB if one.memory else None)
        for one in LEVELS
    )
    return replace(ON_CPU, costs=Costs(tuple(levels)))


def test_the_headline_names_the_smallest_level_that_trains() -> None:
    assert rendered(on_gpu()).startswith("✓ bfloat16 trains in 0.74 of FP32's memory, at 1.96 times its speed.\n")
    failing = tuple(one for one in LEVELS if not one.trains)
    assert rendered(replace(ON_CPU, costs=Costs(failing))).startswith("✗ No level below FP32 finishes 30 steps")
    interrupted = replace(ON_CPU, interrupted=True, costs=Costs(LEVELS[:2]))
    assert rendered(interrupted).startswith("! Interrupted after 2 levels.\n")


@pytest.mark.parametrize(
    ("activations", "seconds", "headline"),
    [
        (297, None, "✓ bfloat16 trains in 0.99 of FP32's memory."),
        (300, None, "? bfloat16 trains, but in no less memory than FP32."),
        (340, None, "? bfloat16 trains, but in no less memory than FP32."),
        (300, 0.05, "✓ bfloat16 trains, but in no less memory than FP32, at 2.00 times its speed."),
        (300, 0.2, "? bfloat16 trains, but in no less memory than FP32, at 0.50 times its speed."),
    ],
)
def test_the_headline_claims_only_real_gains(activations: int, seconds: float | None, headline: str) -> None:
    fp32, lower = (
        replace(one, seconds=seconds and second, memory=StepMemory(0, 0, 0, 0, 0, size * MB))
        for one, second, size in ((LEVELS[0], 0.1, 300), (LEVELS[4], seconds, activations))
    )
    assert rendered(replace(ON_CPU, costs=Costs((fp32, lower))), width=120).splitlines()[0] == headline


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (replace(LEVELS[1], finding=replace(FINDING, severity="warning"), skipped=0), "? forward-overflow in"),
        (replace(LEVELS[1], verdict="inconclusive", finding=None, skipped=0), "? not known"),
        (replace(LEVELS[1], skipped=0), "✗ forward-overflow in"),
    ],
)
def test_only_an_error_finding_marks_a_level_as_failed(level: LevelCost, said: str) -> None:
    assert f"O1        {said}" in rendered(replace(ON_CPU, costs=Costs((LEVELS[0], level, LEVELS[4]))))


@pytest.mark.parametrize(
    ("apart", "noise", "said"),
    [
        (0.04, 0.01, "4%"),
        (0.0401, 0.01, "4%*"),
        (0.0, 0.0, "0%"),
        (0.01, math.nan, "1%*"),
        (0.01, None, "1%*"),
        (1e-7, 0.0, "1e-5%"),
        (1e-7, None, "1e-5%"),
        (1e-5, 0.0, "0.001%*"),
    ],
)
def test_a_distance_to_fp32_beyond_the_noise_has_a_star(apart: float, noise: float | None, said: str) -> None:
    one = replace(LEVELS[4], apart=apart, noise=noise)
    assert rendered(replace(ON_CPU, costs=Costs((LEVELS[0], one)))).splitlines()[5].split()[4] == said


def test_in_60_columns_no_cell_is_cut() -> None:
    assert "…" not in rendered(ON_CPU, width=60)


def test_a_binary_memory_budget_keeps_its_binary_unit() -> None:
    text = rendered(replace(ON_CPU, costs=Costs(LEVELS, batch=32, budget=16 * 2**30)))
    assert "The largest batch in 16 GiB, by doubling\n" in text


def test_without_an_fp32_measurement_no_share_of_fp32_is_shown() -> None:
    text = rendered(replace(ON_CPU, costs=Costs((replace(LEVELS[0], memory=None, error="raised"), *LEVELS[1:]))))
    assert "trains in - of" not in text
    assert [line.split()[-1] for line in text.splitlines() if "━" in line and "B" in line] == ["-", "-", "-"]


SUGGEST = "ampdbg suggest-fp32 config.yaml"
AT_O1 = "ampdbg scan config.yaml --set precision.level=O1"


def levels_with_finding(code: str, verdict: Verdict) -> tuple[LevelCost, ...]:
    return LEVELS[0], replace(LEVELS[1], finding=replace(FINDING, code=code), verdict=verdict)


@pytest.mark.parametrize(
    ("levels", "command"),
    [
        (LEVELS[:2], SUGGEST),
        (LEVELS, AT_O1),
        (levels_with_finding("mask-constant", "other"), SUGGEST),
        ((LEVELS[0], LevelCost("O1", "O1", "float16", error="no autocast here")), AT_O1),
        (levels_with_finding("divergence", "other"), AT_O1),
        (levels_with_finding("unknown", "inconclusive"), AT_O1),
        (LEVELS[2:4], "ampdbg scan config.yaml --set precision.level=O2"),
        ((replace(LEVELS[4], verdict="other"),), f"{AT_O1} --set precision.dtype=bfloat16"),
    ],
)
def test_the_next_command_is_for_the_first_level_that_fails(levels: tuple[LevelCost, ...], command: str) -> None:
    assert rendered(replace(ON_CPU, costs=Costs(levels))).splitlines()[-1] == f"  {command}"
