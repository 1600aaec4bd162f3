"""The page of a scan as text: what stands in it, and what holds for every record."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import Record, TensorCounts
from tests.report.pages import rendered
from tests.report.records import (
    NAMES,
    calibration,
    collapse,
    healthy,
    healthy_step,
    overflow,
    run,
    skipped_step,
)
from tests.strategies import records

CONFIG, RECORD_PATH = "configs/example.yaml", ".ampdbg/20250102T030405Z-scan.json"


def plain(record: Record, width: int = 80, *, unicode: bool = True, color: bool = False) -> str:
    return rendered(record, width=width, color=color, unicode=unicode, config=CONFIG, record_path=RECORD_PATH)


def test_a_healthy_run_is_about_eight_lines() -> None:
    assert len(plain(healthy()).splitlines()) <= 8


@pytest.mark.parametrize(("step", "nan", "is_listed"), [(0, 0, False), (0, 1, True), (1, 0, True)])
def test_a_mask_that_was_made_with_its_infinities_is_no_tensor_to_look_at(step: int, nan: int, is_listed: bool) -> None:
    steps = [healthy_step(number) for number in range(3)]
    buffer = TensorCounts("buffer", "attn_mask", 10, nan, 25, (0, 1))
    for mask in (buffer, replace(buffer, kind="parameter", frozen=True)):
        steps[step] = replace(steps[step], nonfinite=(mask,))
        assert ("Non-finite tensors" in plain(replace(healthy(), steps=tuple(steps)))) is is_listed


def test_a_record_without_a_step_still_has_a_report() -> None:
    text = plain(run([], verdict="inconclusive", interrupted=True, planned_steps=50))
    assert text.startswith("! Interrupted after 0 of 50 steps. The run ended before its first step.\n")


def test_a_long_name_is_folded_not_cut() -> None:
    name = "model." + ".".join(f"layer_{number}" for number in range(20)) + ".weight"
    group = overflow(0, names=(name,))
    text = plain(run([skipped_step(0, 65536.0, group)], verdict="inconclusive", groups=(name,)))
    table = text[text.index("worst share") :]
    assert name in re.sub(r"\s+|1 of 1.*share", "", table.replace("1 of 1      0    3    0        <0.1%", ""))


def test_an_overflow_of_nearly_all_groups_is_one_line() -> None:
    nearly, every = skipped_step(0, 65536.0, overflow(*range(36))), skipped_step(1, 4.0, overflow(*range(38)))
    text = plain(run([nearly, every], verdict="inconclusive"))
    assert "Nearly all of 38 groups at once in 2 steps, first at step 0." in text
    assert "All 38 groups at once in 1 step, first at step 1." in plain(run([every], verdict="inconclusive"))


def test_the_step_with_the_fewest_groups_is_pointed_out() -> None:
    steps = [skipped_step(0, 65536.0, overflow(*range(20))), skipped_step(1, 32768.0, overflow(7, 8))]
    text = plain(run(steps, verdict="inconclusive"))
    assert f"Step 1 hits the fewest groups, 2 of 38: {NAMES[7]}" in text


def test_a_follow_up_is_one_line_below_its_root() -> None:
    root = collapse().findings[0]
    follow = replace(root, code="data-range", message="short", root=0)
    text = plain(run([healthy_step(0)], verdict="inconclusive", findings=(root, follow)))
    assert "\n  └ then data-range at step 10: short\n" in text


def test_a_root_that_points_nowhere_hides_no_finding() -> None:
    finding = replace(collapse().findings[0], root=7)
    assert "error unknown" in plain(run([healthy_step(0)], verdict="inconclusive", findings=(finding,)))


def test_a_run_in_fp32_is_not_sent_to_fp32() -> None:
    record = replace(collapse(), config={"precision": {"level": "O0"}})
    assert "ampdbg scan" not in plain(record)
    assert "ampdbg scan" in plain(collapse())


def test_notes_are_shown() -> None:
    record = healthy()
    record = replace(record, environment=replace(record.environment, notes=("SDPA is assumed to be fused",)))
    assert "Note: SDPA is assumed to be fused" in plain(record)


def test_calibration_is_healthy() -> None:
    assert plain(calibration()).startswith("✓ Healthy")


@given(records())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_record_has_a_report(record: Record) -> None:
    text = plain(record, unicode=False)
    assert text.strip()


def test_a_source_file_below_the_folder_is_named_relative_to_it() -> None:
    source = Source("/home/me/project/model.py", 7, "forward", "x = q @ k")
    finding = Finding("forward-overflow", "error", 0, "forward", "too large", source=source)
    record = replace(healthy(), findings=(finding,))
    assert "  model.py:7 in forward" in rendered(record, folder="/home/me/project")
    assert "/home/me/project/model.py:7" in rendered(record, folder="/home/me/proj")
