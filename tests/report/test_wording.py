"""What no page may say: a NaN is never called an overflow, and every sentence names who does what."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.record.run import GroupOverflow, Record, Step
from tests.report.pages import rendered
from tests.report.runs import RUNS, record_of

PAGES = [Path(__file__).parent / "golden" / f"{name}.txt" for name in RUNS]

UNCLEAR = re.compile(
    r"\b(was|were|is|are) (seen|told|met|got|gone)\b|\bgo(es)? wrong\b|\bwent wrong\b|\bnow and then\b"
    r"|\bmust run in FP32\b|\bis to be\b|\bhas not got\b|\bnothing was found\b",
    re.IGNORECASE,
)
"""Passives without an actor, and words that the reports have plainer ones for."""


def nan_only(record: Record) -> Record:
    """The record as if every inf had been a NaN, diagnosed again, without the replays that show overflows."""
    steps = tuple(map(_step, record.steps))
    return diagnose(replace(record, steps=steps, findings=(), investigations=(), verdict="inconclusive"))


def _step(step: Step) -> Step:
    nonfinite = tuple(replace(counts, inf=0, nan=counts.inf + counts.nan) for counts in step.nonfinite)
    return replace(step, groups=tuple(map(_group, step.groups)), nonfinite=nonfinite)


def _group(group: GroupOverflow) -> GroupOverflow:
    counts = (replace(counts, inf=0, nan=counts.inf + counts.nan) for counts in group.parameters)
    return replace(group, parameters=tuple(counts))


SCANS = [name for name in RUNS if name.startswith("scan_") and name != "scan_mask_constant"]


@pytest.mark.parametrize("name", SCANS)
def test_a_run_with_nan_alone_is_diagnosed_and_shown_without_the_word_overflow(name: str) -> None:
    record = nan_only(record_of(name))
    assert record.findings or not any(step.skipped for step in record.steps)
    assert "overflow" not in rendered(record).lower()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_every_sentence_is_plain(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert UNCLEAR.findall(text) == []


def test_the_words_that_are_looked_for_are_found() -> None:
    said = "no op was seen to go wrong in it, and 2 modules must run in FP32"
    assert len(list(UNCLEAR.finditer(said))) == 3
