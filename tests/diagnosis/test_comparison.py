"""Comparisons of two runs: which changes count as worse or better."""

import math
from dataclasses import replace

import pytest

from ampdbg.diagnosis.comparison import Comparison
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Site
from tests.report.records import run
from tests.report.test_ranges import site

SITES = (
    site(0, "body", "aten.addmm.default", 100.0, 7, "self.body(x)"),
    site(1, "head", "aten.addmm.default", 50.0, 8, "self.head(x)"),
    site(
        2, "head", "aten.mm.default", 1.0, 8, "self.head(x)", phase="backward", scale_ceiling=2.0**16, scale_floor=1.0
    ),
)
OVERFLOW = Finding("forward-overflow", "error", 0, "forward", "reaches 90,000", module="body", op="aten.mul.Tensor")


def measured(*sites: Site, **fields: object) -> Record:
    return run([], sites=sites, **fields)


def compared(now: Record, within: float = 1.0, then: Record | None = None) -> Comparison:
    return Comparison(then or measured(*SITES), now, within)


def lowered(bits: float, at: int = 0) -> Record:
    sites = [*SITES]
    sites[at] = replace(sites[at], headroom_bits=sites[at].headroom_bits - bits)
    return measured(*sites)


@pytest.mark.parametrize(
    ("bits", "within", "is_worse"), [(0.9, 1, False), (1.1, 1, True), (1.1, 2, False), (0, 0, False)]
)
def test_lost_headroom_is_worse_only_beyond_the_allowed_bits(bits: float, within: float, is_worse: bool) -> None:
    one = compared(lowered(bits), within)
    assert one.is_worse is is_worse
    assert [tight.of for tight in one.tighter] == (["body"] if is_worse else [])
    assert not one.reversed.has_lost


def test_more_headroom_is_better() -> None:
    one = compared(lowered(-3.0))
    assert (one.is_worse, one.reversed.has_lost) == (False, True)


def test_a_new_or_removed_module_has_lost_no_headroom() -> None:
    for now in (SITES[1:], (*SITES, site(3, "new", "aten.mul.Tensor", 60000.0, 9, "x * x"))):
        one = compared(measured(*now))
        assert (one.is_worse, one.reversed.has_lost, one.tighter) == (False, False, ())


def test_an_overflow_that_starts_at_a_new_place_is_worse_and_a_moved_line_is_not() -> None:
    bad = measured(*SITES, site(3, "new", "aten.mul.Tensor", 90000.0, 9, "x * x", overflow="starts"))
    (began,) = compared(bad).began
    assert (began.of.module, began.then, began.now) == ("new", 0, 1)
    moved = measured(*SITES, site(3, "new", "aten.mul.Tensor", 90000.0, 12, "y * y", overflow="starts"))
    assert not compared(moved, then=bad).is_worse
    assert [gone.of.module for gone in compared(measured(*SITES), then=bad).reversed.began] == ["new"]
    carried = measured(*SITES, site(3, "new", "aten.mul.Tensor", 90000.0, 9, "x * x", overflow="carried"))
    assert compared(carried).began == ()


@pytest.mark.parametrize(
    ("floor", "ceiling", "lost"),
    [
        *((1.0, 2.0**16, 0.0), (1.0, 2.0**13, 3.0), (16.0, 2.0**16, 4.0), (4.0, 2.0**18, 2.0)),
        *((2.0**-20, 2.0**16, 0.0), (0.0, math.inf, 0.0), (1.0, 2.0**40, 0.0)),
    ],
)
def test_a_window_of_loss_scales_loses_bits_at_either_end(floor: float, ceiling: float, lost: float) -> None:
    now = measured(*SITES[:2], replace(SITES[2], scale_floor=floor, scale_ceiling=ceiling))
    one = compared(now)
    assert max(0.0, one.windows[0].lost) == lost
    assert (one.narrower is not None) == (lost > 1.0) == one.is_worse


def test_a_new_finding_is_worse_unless_it_is_an_effect_or_information() -> None:
    effect = Finding("scale-collapse", "error", 0, "backward", "falls", root=0)
    note = Finding("scale-calibration", "info", 0, "backward", "settles")
    one = compared(measured(*SITES, findings=(OVERFLOW, effect, note)))
    assert one.appeared == (OVERFLOW,)
    later = replace(OVERFLOW, step=4, message="reaches 91,000")
    assert not compared(measured(*SITES, findings=(later,)), then=measured(*SITES, findings=(OVERFLOW,))).is_worse
    assert compared(measured(*SITES, findings=(note,))).appeared == ()
    twice = compared(measured(*SITES, findings=(OVERFLOW, later)), then=measured(*SITES, findings=(OVERFLOW,)))
    assert twice.appeared == (later,)
    gone = compared(measured(*SITES), then=measured(*SITES, findings=(OVERFLOW,)))
    assert (gone.reversed.appeared, gone.is_worse, gone.reversed.has_lost) == ((OVERFLOW,), False, True)


def test_an_error_that_stops_only_the_later_run_is_worse() -> None:
    assert compared(measured(*SITES, error="ValueError: no")).is_worse
    assert not compared(measured(error="no"), then=measured(error="no")).is_worse


def test_a_module_that_was_all_zeros_has_lost_no_headroom() -> None:
    zeros = replace(SITES[0], abs_max=0.0, headroom_bits=math.inf)
    one = compared(measured(*SITES), then=measured(zeros, *SITES[1:]))
    assert (one.is_worse, one.reversed.has_lost, one.tighter) == (False, False, ())
