"""Range profiles: windows of loss scales for modules and models, findings, verdicts, and readiness for FP16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.diagnosis.ranges import diagnose_ranges, module_windows, overflows_at_any_scale, scale_to_try, window
from ampdbg.record.findings import Source
from ampdbg.record.run import AutocastError, Record, Replay, Site, Unseen
from tests.report.records import ENVIRONMENT


def gradient(module: str, floor: float, ceiling: float, *, is_noise: bool = False) -> Site:
    return Site(
        phase="backward",
        module=module,
        op="aten.mm.default",
        source=Source("model.py", 7, "forward", "y = x @ w"),
        dtype="float16",
        order=0,
        calls=1,
        call=0,
        size=4,
        inf=0,
        nan=0,
        abs_max=65504.0 / ceiling if ceiling else math.inf,
        headroom_bits=math.log2(ceiling) if ceiling else -math.inf,
        scale_ceiling=ceiling,
        scale_floor=floor,
        is_noise=is_noise,
    )


def forward(headroom: float, overflow: Literal["", "starts", "carried"] = "") -> Site:
    return replace(
        gradient("block", 0, 1),
        phase="forward",
        scale_ceiling=None,
        scale_floor=None,
        headroom_bits=headroom,
        abs_max=65520.0 * 2.0**-headroom,
        overflow=overflow,
    )


def record(*sites: Site) -> Record:
    return Record("ranges", "2025-01-02T03:04:05Z", ENVIRONMENT, {}, "inconclusive", sites=sites, planned_steps=1)


def test_the_window_of_a_model_is_the_intersection_of_its_gradients_windows() -> None:
    low, high = gradient("a", 0.5, 1024.0), gradient("b", 8.0, 4096.0)
    whole = window([low, forward(3.0), high])
    assert (whole.floor, whole.ceiling, whole.is_open) == (8.0, 1024.0, True)
    assert (whole.lowest_ceiling, whole.highest_floor) == (low, high)


def test_no_usable_scale_names_the_two_sites_with_disjoint_windows() -> None:
    overflowing, vanishing = gradient("loud", 1.0, 16.0), gradient("quiet", 512.0, 2.0**20)
    (finding,) = diagnose_ranges(record(overflowing, vanishing)).findings
    assert (finding.code, finding.severity, finding.module) == ("no-usable-scale", "warning", "loud")
    assert "above a loss scale of 16" in finding.message
    assert "mm in quiet" in finding.message
    assert "below 512" in finding.message


def test_each_module_has_its_own_window_in_order_of_execution() -> None:
    sites = [gradient("b", 1.0, 64.0), gradient("a", 2.0, 32.0), gradient("b", 4.0, 128.0)]
    assert [(one.module, one.floor, one.ceiling) for one in module_windows(sites)] == [
        ("b", 4.0, 64.0),
        ("a", 2.0, 32.0),
    ]


def test_a_noise_gradient_sets_the_ceiling_of_the_window_but_not_its_floor() -> None:
    whole = window([gradient("key.bias", 2.0**30, 64.0, is_noise=True), gradient("a", 1.0, 128.0)])
    assert (whole.floor, whole.ceiling) == (1.0, 64.0)


def test_zero_gradients_do_not_bound_the_window() -> None:
    whole = window([gradient("dead", 0.0, math.inf)])
    assert (whole.floor, whole.ceiling, whole.lowest_ceiling, whole.highest_floor) == (0.0, math.inf, None, None)
    assert window([]) == whole


powers = st.integers(-30, 30).map(lambda exponent: 2.0**exponent)


@given(st.lists(st.builds(gradient, st.sampled_from("abc"), powers, powers), min_size=1))
def test_a_scale_is_in_the_model_window_exactly_if_it_is_in_every_module_window(sites: list[Site]) -> None:
    whole, modules = window(sites), list(module_windows(sites))
    for exponent in range(-31, 32):
        scale = 2.0**exponent
        inside = all(one.floor <= scale <= one.ceiling for one in modules)
        assert (whole.floor <= scale <= whole.ceiling) == inside


def test_only_the_start_of_a_forward_overflow_is_a_warning() -> None:
    seen = diagnose_ranges(record(forward(-1.0, "starts"), forward(-2.0, "carried"), forward(0.5)))
    assert [(finding.code, finding.severity) for finding in seen.findings] == [("forward-overflow", "warning")]
    assert seen.verdict == "inconclusive"


def test_a_gradient_with_a_scale_ceiling_below_1_is_a_gradient_overflow() -> None:
    seen = diagnose_ranges(record(gradient("a", 2.0**-20, 0.5)))
    assert [finding.code for finding in seen.findings] == ["gradient-overflow"]


def test_ranges_within_the_limits_are_healthy() -> None:
    seen = diagnose_ranges(record(forward(0.1), gradient("a", 1.0, 1.0)))
    assert (seen.findings, seen.verdict) == ((), "healthy")


def test_an_autocast_error_in_a_range_profile_is_a_finding() -> None:
    error = AutocastError("misuse-bce", 0, "unsafe to autocast")
    assert [finding.code for finding in diagnose_ranges(replace(record(), autocast_error=error)).findings] == [
        "misuse-bce"
    ]


WIDE, HALF, FP32 = (
    Replay(dtype, scale, 1.0, 1.0) for dtype, scale in (("bfloat16", 1.0), ("float16", 256.0), ("float32", 1.0))
)


def lost(replay: Replay) -> Replay:
    return replace(replay, loss=math.nan, grad_norm=math.nan, gradients=("w", "b"), nan=12)


def spoilt(replay: Replay) -> Replay:
    return replace(replay, grad_norm=math.inf, gradients=("w",), inf=3, nan=1)


@pytest.mark.parametrize("fails", [lost, spoilt])
def test_a_step_that_is_not_finite_in_fp32_has_verdict_other(fails: Callable[[Replay], Replay]) -> None:
    overflowing = (forward(-1.0, "starts"), gradient("a", 2.0**-20, 0.5))
    for sites in ((forward(3.0), gradient("a", 1.0, 1024.0)), overflowing):
        seen = diagnose_ranges(replace(record(*sites), checks=(fails(WIDE), fails(FP32))))
        first, *others = seen.findings
        assert (seen.verdict, first.code, first.severity) == ("other", "unknown", "warning")
        assert first.evidence["finite_in_fp32"] is False
        assert [other.code for other in others] == ["forward-overflow"] * (sites is overflowing)


@pytest.mark.parametrize(("fp32", "told"), [(FP32, True), (replace(FP32, error="TypeError: no"), None)])
def test_the_verdict_is_inconclusive_if_fp32_is_finite_or_raises(fp32: Replay, told: bool | None) -> None:
    seen = diagnose_ranges(replace(record(forward(3.0)), checks=(lost(WIDE), fp32)))
    assert (seen.verdict, seen.findings[0].evidence.get("finite_in_fp32")) == ("inconclusive", told)


REFUTED = {
    "finite": (HALF, None),
    "a loss that is not finite": (lost(HALF), "forward"),
    "gradients that are not finite at a scale inside the window": (spoilt(HALF), "backward"),
    "gradients that are not finite at the window's end": (spoilt(replace(HALF, scale=1024.0)), None),
    "an error": (replace(HALF, loss=math.nan, error="RuntimeError: no"), "forward"),
}


@pytest.mark.parametrize(("half", "phase"), REFUTED.values(), ids=REFUTED)
def test_a_failed_fp16_check_within_the_window_is_inconclusive(half: Replay, phase: str | None) -> None:
    seen = diagnose_ranges(replace(record(forward(3.0), gradient("a", 1.0, 1024.0)), checks=(WIDE, half)))
    assert [finding.phase for finding in seen.findings] == ([] if phase is None else [phase])
    assert seen.verdict == ("healthy" if phase is None else "inconclusive")


def test_unmeasured_parts_make_the_verdict_inconclusive() -> None:
    seen = diagnose_ranges(replace(record(forward(3.0)), unseen=Unseen(unmeasured=("Fourier transforms",))))
    assert (seen.findings, seen.verdict) == ((), "inconclusive")


def test_the_scale_to_try_is_half_the_ceiling_within_the_window_and_at_least_1() -> None:
    assert scale_to_try([gradient("a", 1.0, 1024.0)]) == 512.0
    assert scale_to_try([gradient("a", 1024.0, 1024.0)]) == 1024.0
    assert scale_to_try([gradient("a", 0.0, math.inf)]) == scale_to_try([]) == 65536.0
    assert scale_to_try([gradient("a", 2.0**20, math.inf)]) == 2.0**20
    assert scale_to_try([gradient("a", 1024.0, 2.0)]) == 1.0
    assert scale_to_try([forward(-1.0, "carried"), gradient("a", 1.0, 1024.0)]) == 512.0
    assert scale_to_try([gradient("a", 0.0, 0.25)]) == 1.0
    starting = [forward(-1.0, "starts"), gradient("a", 1.0, 1024.0)]
    assert overflows_at_any_scale(starting)
    assert scale_to_try(starting) == 512.0


def bf16(*sites: Site, checks: tuple[Replay, ...], unmeasured: tuple[str, ...] = ()) -> Record:
    wide = tuple(replace(site, dtype="bfloat16") for site in sites)
    return diagnose_ranges(replace(record(*wide), checks=(WIDE, *checks), unseen=Unseen(unmeasured=unmeasured)))


PINNED = replace(HALF, pins=("block",))
FITTING, STARTING = (forward(3.0), gradient("a", 1.0, 1024.0)), (forward(-1.0, "starts"), gradient("a", 1.0, 1024.0))
READY = {
    "it fits": (FITTING, (HALF,), True, ()),
    "pins cure it": (STARTING, (lost(HALF), PINNED), True, ("block",)),
    "an overflow that reaches nothing": (STARTING, (HALF,), True, ()),
    "no pins cure it": (STARTING, (lost(HALF), lost(PINNED)), False, ()),
    "nothing of it is left in half": ((forward(-1.0, "starts"),), (lost(HALF), PINNED), False, ()),
    "gradients alone at one scale": (FITTING, (spoilt(HALF),), None, ()),
    "no scale is left": ((*FITTING, gradient("b", 4096.0, 8192.0)), (HALF,), None, ()),
    "an error": (FITTING, (replace(HALF, loss=math.nan, error="RuntimeError: no"),), None, ()),
}


@pytest.mark.parametrize(("sites", "checks", "trains", "pins"), READY.values(), ids=READY)
def test_the_readiness_of_a_bfloat16_step_follows_its_fp16_checks_and_window(
    sites: tuple[Site, ...], checks: tuple[Replay, ...], trains: bool | None, pins: tuple[str, ...]
) -> None:
    ready = bf16(*sites, checks=checks).readiness
    assert ready is not None
    assert (ready.trains, ready.pins) == (trains, pins)
    assert ready.largest == sites[0].abs_max


def test_the_loss_scales_of_a_ready_step_ignore_the_pinned_modules() -> None:
    ready = bf16(*STARTING, gradient("block", 2.0**15, 2.0**20), checks=(lost(HALF), PINNED)).readiness
    assert ready is not None
    assert (ready.floor, ready.ceiling) == (1.0, 1024.0)


def test_unmeasured_parts_leave_the_readiness_undecided() -> None:
    ready = bf16(*FITTING, checks=(HALF,), unmeasured=("Fourier transforms",)).readiness
    assert ready is not None
    assert ready.trains is None


def test_only_a_bfloat16_step_with_an_fp16_check_has_a_readiness() -> None:
    assert diagnose_ranges(replace(record(*FITTING), checks=(WIDE, HALF))).readiness is None
    in_fp32 = [replace(site, dtype="float32") for site in FITTING]
    assert diagnose_ranges(replace(record(*in_fp32), checks=(WIDE, HALF))).readiness is None
    assert bf16(*FITTING, checks=(FP32,)).readiness is None
