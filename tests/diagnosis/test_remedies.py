"""Remedies other than a pin: what is said of which finding, with its place and what it changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ampdbg.diagnosis.remedies import other_remedies
from ampdbg.record.codes import CHANGED, CODES, SAME, Code
from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import Record, Step
from tests.report.records import healthy_step, overflow, run, skipped_step

LINE = Source("/home/me/model.py", 41, "forward", "    scores = q @ k.transpose(-1, -2) / math.sqrt(d)")
DYNAMIC = {"init": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def finding(code: str, **fields: object) -> Finding:
    found = Finding(code=code, severity="error", step=3, phase="forward", message="it fails", remedy="repair it")
    return replace(found, **fields)  # type: ignore[arg-type]


def told(found: Finding, steps: tuple[Step, ...] = (), loss_scale: object = DYNAMIC) -> tuple[str, ...]:
    config: Mapping[str, object] = {"precision": {"loss_scale": loss_scale}}
    return other_remedies(run(steps or (healthy_step(0),), findings=(found,), config=config))


AT_THE_LINE = {
    "a product that is scaled": (
        finding("forward-overflow", op="aten.bmm.default", source=LINE, evidence={"value": 183284.3}),
        f"scale before the product: (q * s) @ k in place of (q @ k) * s ({SAME})",
    ),
    "a sum": (
        finding("forward-overflow", op="aten.sum.dim_IntList", source=LINE),
        f"add up in FP32: sum(..., dtype=torch.float32) ({SAME})",
    ),
    "a loss that sums": (
        finding(
            "gradient-overflow", phase="backward", op="aten.mul.Tensor", source=replace(LINE, text="loss = x.sum()")
        ),
        "take a mean in place of the sum (changes the loss by a factor, and so the learning rate that fits)",
    ),
    "a statistic": (
        finding("silent-overflow", op="aten.pow.Tensor_Scalar", source=LINE),
        f"compute this statistic in FP32: x.float() before it, or sum(..., dtype=torch.float32) ({SAME})",
    ),
    "an eps": (
        finding("eps-underflow", source=LINE),
        f"an eps of at least 1e-6, which FP16 does not round to zero ({CHANGED} slightly)",
    ),
    "a mask": (
        finding("mask-constant", source=LINE),
        f"masked_fill(mask, torch.finfo(x.dtype).min), or a boolean mask, in place of the constant ({SAME})",
    ),
    "a misuse": (finding("misuse-no-update", source=LINE), "repair it"),
}


@pytest.mark.parametrize("name", AT_THE_LINE)
def test_a_remedy_stands_at_its_line(name: str) -> None:
    found, text = AT_THE_LINE[name]
    assert told(found) == (f"/home/me/model.py:41: {text}",)


@pytest.mark.parametrize(
    "text", ["x = self.proj(x)", 'n = torch.einsum("nlhd,nhd->nlh", q, k_sum)', "logits = (q * self.scale) @ k.mT"]
)
def test_a_product_that_is_not_scaled_has_no_scaling_to_move(text: str) -> None:
    assert told(finding("forward-overflow", op="aten.bmm.default", source=replace(LINE, text=text))) == ()


def test_gradients_that_vanish_at_a_static_scale_want_a_dynamic_one() -> None:
    found = finding("gradient-underflow", evidence={"loss_scale": 1.0})
    assert told(found, loss_scale=1.0) == (
        f"a dynamic loss scale, GradScaler(init_scale=65536, growth_interval=2000), in place of the static 1 ({SAME})",
    )


def test_gradients_that_vanish_at_a_small_scale_want_a_larger_one() -> None:
    found = finding("gradient-underflow", evidence={"loss_scale": 8.0})
    assert told(found) == (f"a larger loss scale to begin with: init_scale=65536 in place of 8 ({SAME})",)


def test_gradients_that_vanish_at_the_usual_scale_want_it_to_grow() -> None:
    found = finding("gradient-underflow", evidence={"loss_scale": 65536.0})
    (line,) = told(found)
    assert "growth_interval=200 in place of 2000" in line


def test_skips_at_the_start_name_the_scale_that_worked_first() -> None:
    steps = (*(skipped_step(n, 65536.0 / 2**n, overflow(0)) for n in range(3)), healthy_step(3, 8192.0))
    found = finding("scale-calibration", severity="info")
    assert told(found, steps) == (f"init_scale=8192 in place of 65536 saves the 3 steps skipped at the start ({SAME})",)


def test_skips_after_growth_name_a_longer_interval() -> None:
    steps: list[Step] = []
    for start in range(0, 30, 3):
        steps += [healthy_step(start, 1024.0), healthy_step(start + 1, 1024.0)]
        steps += [skipped_step(start + 2, 2048.0, overflow(0))]
    found = finding("scale-calibration", severity="info")
    lines = told(found, tuple(steps), {**DYNAMIC, "init": 1024.0, "growth_interval": 2})
    assert lines == (f"growth_interval=2000 in place of 2: the scaler skipped 10 steps after growing ({SAME})",)


def test_what_another_finding_explains_has_no_remedy_of_its_own() -> None:
    record = run([healthy_step(0)], findings=(finding("mask-constant"), finding("scale-runaway", root=0)))
    assert len(other_remedies(record)) == 1


def test_the_same_is_said_once() -> None:
    record = run([healthy_step(0)], findings=(finding("mask-constant"), finding("mask-constant", step=9)))
    assert len(other_remedies(record)) == 1


@pytest.mark.parametrize(
    "code", [code for code in CODES.values() if code.verdict == "other"], ids=lambda code: code.name
)
def test_what_no_pin_cures_has_its_own_remedy(code: Code) -> None:
    (line,) = told(finding(code.name, remedy=code.remedy))
    assert line == (code.instead or code.remedy)


def test_a_healthy_run_needs_none() -> None:
    record: Record = run([healthy_step(n) for n in range(5)])
    assert other_remedies(record) == ()
    assert math.isfinite(record.steps[-1].loss)
