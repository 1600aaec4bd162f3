"""The outcome of each golden run, field by field: in the packed records and in new runs."""

from dataclasses import dataclass
from typing import Any

import pytest

from ampdbg.diagnosis.ranges import window
from ampdbg.record.findings import Finding
from ampdbg.record.pins import PinSite
from ampdbg.record.run import Record, Site
from tests.report.runs import RUNS, record_of, remade
from tests.siblings import slow_except

BMM, CAST = "aten.bmm.default", "aten._to_copy.default"


@dataclass(frozen=True)
class Outcome:
    """The compared fields of a record.

    ``findings``: code, severity, step, phase, module, op and line; for an effect, also the index of its root.
    ``steps``: their number, the number of skipped steps, and the last loss scale.
    ``pins``: name, and phase, op and line of each op that it keeps in FP32.
    ``search``: strategy, outcome, step, whether the set is minimal, trials, and further batches that it cures.
    ``patch``: files, places in them, whether it is proven, and the number of checks.
    ``levels``: name, verdict, skipped steps, the multiple of the batch that fits, and its finding's code and module.
    ``ranges``: the lines where an overflow starts, and the lowest and the highest working loss scale.
    """

    verdict: str = "precision"
    findings: tuple[tuple[Any, ...], ...] = ()
    steps: tuple[Any, ...] = (6, 6, 2048.0)
    pins: tuple[tuple[Any, ...], ...] = ()
    search: tuple[Any, ...] = ()
    patch: tuple[Any, ...] = ()
    levels: tuple[tuple[Any, ...], ...] = ()
    ranges: tuple[Any, ...] = ()
    interrupted: bool = False
    captures: int = 0


def line_of(it: Finding | PinSite | Site) -> int | None:
    return it.source.line if it.source else None


def outcome(record: Record) -> Outcome:
    made, patch, proof, costs = record.search, record.handover, record.verification, record.costs
    scales, measured = [step.scale for step in record.steps], window(record.sites)
    skipped = sum(step.skipped for step in record.steps)
    findings = (
        ((one.code, one.severity, one.step, one.phase, one.module, one.op, line_of(one)), one.root)
        for one in record.findings
    )
    levels = (
        ((one.name, one.verdict, one.skipped, one.fit and one.fit.times), one.finding)
        for one in (costs.levels if costs else ())
    )
    search = made and (made.strategy, made.outcome, made.step, made.minimal, len(record.trials), made.further_healthy)
    starts = [line_of(site) for site in record.sites if site.overflow == "starts"]
    places = [*(file.path for file in patch.files), *(unit.title for unit in patch.units)] if patch else []
    return Outcome(
        verdict=record.verdict,
        findings=tuple(facts if root is None else (*facts, root) for facts, root in findings),
        steps=(len(scales), skipped, scales[-1]) if scales else (),
        pins=tuple((pin.name, *((site.phase, site.op, line_of(site)) for site in pin.sites)) for pin in record.pins),
        search=search or (),
        patch=(*places, proof.passed, len(proof.steps)) if proof else (),
        levels=tuple((*facts, found.code, found.module) if found else facts for facts, found in levels),
        ranges=(*starts, measured.floor, measured.ceiling) if record.sites else (),
        interrupted=record.interrupted,
        captures=len(record.script.captures) if record.script else 0,
    )


COLLAPSE = ("scale-collapse", "error", 0, "backward", "", "", None, 0)
SETTLES = ("scale-calibration", "info", 0, "backward", "", "", None)
SCORES = ("forward-overflow", "error", 0, "forward", "attn", BMM, 30)
GRADIENT = ("gradient-overflow", "error", 0, "backward", "", CAST, 32)
LOGARITHM = ("true-nan", "error", 0, "forward", "", "aten.log.default", 20)
RANDOM = ("unknown", "error", 2, "forward", "", "", None)
OF_SCRIPT = ("forward-overflow", "error", 0, "forward", "attention", BMM, 16)
CAUSED = (SCORES, COLLAPSE)
SCORES_PIN = ("attn:own", ("forward", BMM, 30))
UNDERFLOW = ("gradient-underflow", "error", 5, "forward", "", "", None)
NO_SCALE = ("no-usable-scale", "warning", 0, "backward", "first", "aten.sum.dim_IntList", 27)
OF_LOSSES = ("forward-overflow", "error", 0, "forward", "", "aten.mul.Tensor", 32)
OF_DATA = ("data-range", "error", 2, "data", "head", CAST, 25)
IN_BLOCKS = tuple(
    ("forward-overflow", "warning", 0, "forward", f"blocks.{block}.attn", BMM, line)
    for block in (0, 1)
    for line in (49, 50)
)


def failing(skipped: int) -> tuple[Any, ...]:
    """A level at which the example overflows."""
    return "precision", skipped, 4, "forward-overflow", "blocks.0.attn"


OUTCOMES = {
    "scan_healthy": Outcome("healthy", (SETTLES,), (6, 1, 512.0)),
    "scan_calibration": Outcome("inconclusive", (SETTLES,), (12, 12, 32.0)),
    "scan_forward_overflow": Outcome(findings=CAUSED),
    "scan_gradient_overflow": Outcome(findings=(GRADIENT, COLLAPSE)),
    "scan_gradient_underflow": Outcome(findings=(UNDERFLOW,), steps=(6, 0, 1.0)),
    "scan_runaway_scale": Outcome(
        findings=((*GRADIENT[:-1], 24), ("scale-runaway", "error", 29, "backward", "", "", None, 0)),
        steps=(30, 22, 2.0**-6),
    ),
    "scan_mask_constant": Outcome("other", (("mask-constant", "error", 0, "forward", "attn", "", 17),), steps=()),
    "scan_bad_batch": Outcome("other", (("data-nonfinite", "error", 2, "data", "", "", None),), (6, 2, 16384.0)),
    "scan_bad_weights": Outcome("other", (("weights-nonfinite", "error", 0, "forward", "", "", None), COLLAPSE)),
    "scan_poisoned_buffer": Outcome(
        findings=(
            ("forward-overflow", "error", 3, "forward", "body", "aten.addmm.default", 27),
            ("buffer-poisoned", "error", 3, "forward", "norm", "aten.addmm.default", 27, 0),
        ),
        steps=(6, 3, 8192.0),
    ),
    "scan_true_nan": Outcome("other", (LOGARITHM, COLLAPSE)),
    "scan_not_reproduced": Outcome("inconclusive", (RANDOM,), (6, 2, 16384.0)),
    "scan_several_losses": Outcome(findings=(OF_LOSSES, COLLAPSE)),
    "scan_interrupted": Outcome("inconclusive", (SETTLES,), (3, 3, 16384.0), interrupted=True),
    "ranges_overflow": Outcome(
        "inconclusive", (("forward-overflow", "warning", *SCORES[2:]),), (), ranges=(30, 1.0, 256.0)
    ),
    "ranges_no_scale": Outcome("inconclusive", (NO_SCALE,), (), ranges=(2048.0, 2.0)),
    "ranges_example": Outcome("inconclusive", IN_BLOCKS, (), ranges=(49, 50, 49, 50, 4096.0, 65536.0)),
    "bisect_found": Outcome(findings=CAUSED, pins=(SCORES_PIN,), search=("guided", "found", 0, True, 6, 3)),
    "bisect_gradients": Outcome(
        findings=(GRADIENT, COLLAPSE),
        pins=(("body", ("backward", CAST, 27)), ("head", ("backward", CAST, 28))),
        search=("guided", "found", 0, True, 10, 3),
    ),
    "bisect_example": Outcome(
        findings=(("forward-overflow", "error", 18, "forward", "", "aten.mul.Tensor", 45),),
        steps=(50, 0, 65536.0),
        pins=((":own", ("forward", "aten.mul.Tensor", 45)),),
        search=("guided", "found", 18, True, 6, 3),
    ),
    "bisect_blind": Outcome(findings=CAUSED, pins=(SCORES_PIN,), search=("ddmin", "found", 0, True, 9, 3)),
    "bisect_out_of_trials": Outcome(
        findings=CAUSED, pins=(("", ("forward", BMM, 30)),), search=("ddmin", "out-of-trials", 0, False, 1, 0)
    ),
    "bisect_interrupted": Outcome(
        findings=CAUSED, pins=(SCORES_PIN,), search=("guided", "out-of-trials", 0, False, 2, 0), interrupted=True
    ),
    "bisect_nothing_to_pin": Outcome(
        "inconclusive", (SETTLES,), (12, 12, 32.0), search=("guided", "nothing-to-pin", None, False, 0, 0)
    ),
    "bisect_fp32_fails": Outcome("other", (LOGARITHM, COLLAPSE), search=("guided", "fp32-fails", None, False, 0, 0)),
    "bisect_no_pin_helps": Outcome(
        "other", (OF_DATA,), (6, 1, 32768.0), search=("guided", "no-pin-helps", None, False, 0, 0)
    ),
    "bisect_not_reproduced": Outcome(
        "inconclusive", (RANDOM,), (6, 2, 16384.0), search=("guided", "not-reproduced", 2, False, 0, 0)
    ),
    "suggestion": Outcome(
        findings=CAUSED,
        pins=(SCORES_PIN,),
        search=("guided", "found", 0, True, 6, 3),
        patch=("tests/zoo/cases/scores_before_scaling.py", "line 30 of scores_before_scaling.py", True, 9),
    ),
    "cost": Outcome(
        "inconclusive",
        steps=(),
        levels=(
            ("FP32", "healthy", 0, 2),
            ("O1", *failing(8)),
            ("O2", *failing(8)),
            ("O3", *failing(0)),
            ("bfloat16", "healthy", 0, 4),
        ),
    ),
    "run": Outcome(findings=(OF_SCRIPT, COLLAPSE), captures=1),
    "replay": Outcome(findings=(OF_SCRIPT,), steps=(1, 1, 65536.0), captures=1),
    "suggestion_capture": Outcome(
        findings=(OF_SCRIPT,),
        steps=(1, 1, 65536.0),
        pins=(("attention:own", ("forward", BMM, 16)),),
        search=("guided", "found", 0, True, 3, 0),
        patch=("train.py", "lines 16 to 17 of train.py", True, 8),
        captures=1,
    ),
}

QUICK = ("scan_mask_constant", "scan_bad_weights", "scan_interrupted", "ranges_overflow", "ranges_no_scale")
"""Runs of a tenth of a second. tests/zoo checks the roots of the other scans, and tests/pinning the sets of pins."""


@pytest.mark.parametrize("name", RUNS)
def test_the_packed_record_of_a_run_has_the_expected_outcome(name: str) -> None:
    assert outcome(record_of(name)) == OUTCOMES[name]


@pytest.mark.parametrize("name", slow_except(QUICK, RUNS))
def test_a_new_run_has_the_expected_outcome(name: str) -> None:
    assert outcome(remade(name)) == OUTCOMES[name]
