"""The page of a range profile: the order of sites, the headline, working loss scales, and notes."""

import math
from dataclasses import replace
from typing import Literal

import pytest

from ampdbg.diagnosis.ranges import diagnose_ranges
from ampdbg.formats import headroom_bits
from ampdbg.quantities import number
from ampdbg.record.findings import Source
from ampdbg.record.run import AutocastError, Record, Replay, ScriptRun, Site, Step, Unseen
from tests.report.pages import rendered
from tests.report.records import ENVIRONMENT

Order = Literal["tightest", "execution"]


def site(order: int, module: str, op: str, abs_max: float, line: int, text: str, **more: object) -> Site:
    exponents = (1, 1, 4, 4, 50, 50, 250, 250, 450, 50)
    measured = Site(
        "forward", module, op, Source("/home/me/model.py", line, "forward", text), "float16", order, calls=1, call=0,
        size=1110, inf=0, nan=0, abs_max=abs_max, headroom_bits=round(headroom_bits(abs_max), 2),
        lowest_exponent=math.frexp(abs_max)[1] - 10, exponents=exponents,
    )  # fmt: skip
    return replace(measured, **more)  # type: ignore[arg-type]


SITES = (
    site(0, "blocks.0.attn", "aten.bmm.default", 3000.0, 31, "scores = q @ k.transpose(-1, -2)"),
    site(1, "blocks.0", "aten.add.Tensor", 90000.0, 48, "return x + self.mlp(self.norm2(x))", overflow="starts"),
    site(2, "blocks.1.norm1", "aten._to_copy.default", 90000.0, 44, "h = self.norm1(x)", overflow="carried"),
    site(3, "blocks.1", "aten.mul.Tensor", 2.0**15, 47, "x = x * self.gain", calls=3, call=2),
    site(4, "head", "aten.mul.Tensor", 1e6, 60, "return logits.square() * temperature" * 3, overflow="starts"),
    site(5, "head", "aten.mm.default", 2.0, 60, "", phase="backward", scale_ceiling=16384.0, scale_floor=2.0**-4),
    site(6, "blocks.0", "aten.mm.default", 2.0**-20, 48, "", phase="backward", scale_ceiling=2.0**35, scale_floor=4.0),
)


HEALTHY = (SITES[0], *SITES[5:])


def overflowing() -> Record:
    record = Record("ranges", "2025-01-02T03:04:05Z", ENVIRONMENT, {}, "inconclusive", sites=SITES, planned_steps=1)
    return diagnose_ranges(record)


def healthy() -> Record:
    return diagnose_ranges(replace(overflowing(), sites=HEALTHY))


def no_scale() -> Record:
    quiet = replace(SITES[6], scale_floor=2.0**15)
    return diagnose_ranges(replace(overflowing(), sites=(SITES[0], SITES[5], quiet)))


def plain(record: Record, order: Order = "tightest", top: int = 10) -> str:
    return rendered(record, order=order, top=top)


def rows(text: str) -> list[str]:
    """Module and op of each site, in the listed order."""
    return [line.split("│")[2][1:].strip().partition(" · model")[0] for line in text.splitlines() if "│" in line]


def test_sites_are_listed_by_headroom_or_on_request_in_order_of_execution() -> None:
    first, second, third = "blocks.0 · add", "blocks.1.norm1 · to_copy", "head · mul"
    assert rows(plain(overflowing(), top=3)) == [third, first, second]
    assert rows(plain(overflowing(), "execution", 3)) == [first, second, third]


def test_sites_that_start_an_overflow_are_listed_before_carried_overflows() -> None:
    masks = [site(10 + at, f"blocks.{at}", "aten.mul.Tensor", 1e9, 40, "", overflow="carried") for at in range(30)]
    listed = rows(plain(diagnose_ranges(replace(overflowing(), sites=(*masks, *SITES))), top=3))
    assert listed == ["head · mul", "blocks.0 · add", "blocks.0 · mul"]


def test_masks_of_fp16s_lowest_number_do_not_count_as_lost_headroom() -> None:
    masks = [site(10 + at, f"blocks.{at}", "aten.masked_fill.Scalar", 65536.0, 40, "") for at in range(5)]
    masks = [replace(mask, headroom_bits=-0.0, overflow="carried") for mask in masks]
    text = plain(diagnose_ranges(replace(overflowing(), sites=(SITES[0], *masks))), top=2)
    assert "the forward pass has 4.5 bits to spare (a factor of 22)" in " ".join(text.split())
    assert rows(text)[0] == "blocks.0.attn · bmm"


@pytest.mark.parametrize(("own", "told"), [(2.0, "below"), (4.0, ""), (16384.0, ""), (32768.0, "above")])
def test_the_page_states_if_a_captured_steps_scale_is_outside_the_working_scales(own: float, told: str) -> None:
    sites = tuple(each for each in SITES if each.overflow != "starts")
    step = Step(3, 1.0, own, False, False)
    of_script = replace(overflowing(), sites=sites, script=ScriptRun("train.py"), steps=(step,))
    text = " ".join(plain(diagnose_ranges(of_script)).split())
    assert ("loss scales from 4 to 16,384 work." in text) is not bool(told)
    assert not told or f"work; the step's own scale, {number(own)}, is {told} them." in text


def test_the_headline_states_an_interrupt_or_an_autocast_error() -> None:
    stopped = replace(overflowing(), sites=(), findings=(), interrupted=True)
    assert plain(stopped).startswith("! Interrupted after 0 of 1 step, before the ranges were measured.")
    error = AutocastError("misuse-bce", 0, "unsafe to autocast")
    text = plain(diagnose_ranges(replace(overflowing(), sites=(), autocast_error=error)))
    assert text.startswith("? Autocast made the step raise an error")
    assert "misuse-bce" in text


WIDE, HALF, FP32 = (
    Replay(dtype, scale, 1.0, 1.0) for dtype, scale in (("bfloat16", 1.0), ("float16", 512.0), ("float32", 1.0))
)
NAN = replace(WIDE, loss=math.nan)
SPOILT = replace(WIDE, gradients=("w", "b"), nan=288, inf=1)
FITS = "? Everything fits FP16 at step 0: the forward pass has 4.5 bits to spare (a factor of 22); but in FP16 the"
CHECKED = {
    "gradients": (
        (SPOILT, replace(SPOILT, dtype="float32")),
        "✗ Step 0 is not finite in FP32 either: the gradients hold 288 NaN and 1 inf, in 2 parameters. Neither",
    ),
    "bfloat16": (
        (NAN, FP32),
        (
            "? Step 0 is not finite in bfloat16, in which ampdbg measures ranges, although it is in FP32: "
            "the loss is NaN. So nothing"
        ),
    ),
    "FP16's gradients": (
        (WIDE, replace(HALF, gradients=("w",), inf=3)),
        f"{FITS} gradients hold 3 inf, in 1 parameter, at a loss scale of 512 that the ranges allow.",
    ),
}


@pytest.mark.parametrize(("checks", "said"), CHECKED.values(), ids=CHECKED)
def test_the_page_of_a_nonfinite_step_states_no_working_loss_scales(checks: tuple[Replay, ...], said: str) -> None:
    text = plain(diagnose_ranges(replace(healthy(), checks=checks)))
    assert " ".join(text.split()).startswith(said)
    assert "Loss scales" not in text
    assert text.endswith("Next: see where it starts\n  ampdbg scan config.yaml\n")


LOST = replace(HALF, loss=math.nan)
PINNED = replace(HALF, scale=4096.0, pins=("blocks.0:own", "head"))
WITH = "Judging by step 0, this would train in FP16 with"
SMALL = "its largest magnitude, 3,000, is 4.6% of 65,504, and"
LARGE = "its largest magnitude, 1,000,000, is 15 times 65,504, and"
SCALES = "loss scales from 4 to 16,384 work."
OWN_LINES = "blocks.0 (its own lines) and head pinned"
NOT = "! Judging by step 0, this would not train in FP16: the loss is NaN at any loss scale"
OPEN = "? It is open whether this would train in FP16. Everything fits FP16 at step 0"
IN_BFLOAT16 = {
    "it fits": (HEALTHY, (HALF,), f"✓ {WITH} nothing pinned: {SMALL} {SCALES}", "scan"),
    "pins": (
        SITES,
        (LOST, PINNED),
        f"! {WITH} {OWN_LINES}, without which the loss is NaN: {LARGE} any",
        "suggest-fp32",
    ),
    "harmless": (
        SITES,
        (HALF,),
        f"! {WITH} nothing pinned, though FP16 overflows at 2 places: {LARGE} {SCALES}",
        "scan",
    ),
    "no pins": (
        SITES,
        (LOST, replace(LOST, pins=("head",))),
        f"{NOT}, and ampdbg found no pin that helps.",
        "suggest-fp32",
    ),
    "an error": (HEALTHY, (replace(LOST, error="TypeError: no"),), OPEN, "scan"),
}


@pytest.mark.parametrize(("sites", "checks", "said", "command"), IN_BFLOAT16.values(), ids=IN_BFLOAT16)
def test_the_headline_of_a_bfloat16_step_states_whether_fp16_would_train(
    sites: tuple[Site, ...], checks: tuple[Replay, ...], said: str, command: str
) -> None:
    wide = tuple(replace(one, dtype="bfloat16") for one in sites)
    record = diagnose_ranges(replace(overflowing(), sites=wide, checks=(WIDE, *checks)))
    text = " ".join(plain(record).split())
    assert text.startswith(said)
    assert text.endswith(f" ampdbg {command} config.yaml --set precision.dtype=float16")
    scales = " and ".join(dict.fromkeys(number(check.scale) for check in checks))
    assert f"measured in bfloat16, then run in FP16 at a loss scale of {scales}, without the optimizer" in text
    captured = replace(record, script=ScriptRun("train.py"), steps=(Step(3, 1.0, 1.0, False, False),))
    assert "Next:" not in plain(captured)


def test_findings_in_a_captured_step_have_the_number_of_the_step() -> None:
    captured = replace(healthy(), script=ScriptRun("train.py"), steps=(Step(3, 1.0, 16.0, False, False),))
    (finding,) = diagnose_ranges(replace(captured, checks=(WIDE, replace(HALF, loss=math.nan)))).findings
    assert finding.step == 3
    assert {finding.step for finding in diagnose_ranges(replace(captured, sites=SITES)).findings} == {3}


def test_the_page_prints_the_notes_of_a_record() -> None:
    record = replace(healthy(), unseen=Unseen(notes=("module 'a' is compiled; its eager code was analysed",)))
    assert "Note: module 'a' is compiled; its eager code was analysed\n" in plain(record)
