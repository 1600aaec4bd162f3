"""A long run: its record stays small, what matters in it is there, and what is said of it counts every step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes.open_step import OpenStep
from ampdbg.probes.steps import MOST_STEPS, STEPS_AT_ENDS, StepLog
from ampdbg.record.file import to_json
from ampdbg.record.run import Environment, Record, Step
from ampdbg.report.formats import written
from ampdbg.report.view import Look, Typed

SKIPS = {0: 65536.0, 5_003: 65536.0, 5_005: 65536.0, 19_000: 65536.0}


def logged(count: int, skips: dict[int, float]) -> tuple[Step, ...]:
    """The steps that a log of a run keeps; after each of ``skips`` the scale is half of what it was for ten steps."""
    log = StepLog(torch.nn.Linear(1, 1), None)
    losses = torch.linspace(2.0, 1.0, count).unbind()
    for number in range(count):
        low = any(skip < number <= skip + 10 for skip in skips) and number not in skips
        step = OpenStep(scale=torch.tensor(32768.0 if low else 65536.0), skipped=number in skips)
        log.add_losses({"loss": losses[number]}, 1.0)
        log.close(step)
    assert log.closed() == count
    return log.steps


def record_of(steps: tuple[Step, ...]) -> Record:
    environment = Environment("0", "3", "2", "linux", "cpu", "", "cuda", emulated=True)
    return Record("scan", "2026", environment, {}, "inconclusive", steps, planned_steps=steps[-1].step + 1)


def same_of(whole: Record, thinned: Record) -> tuple[Record, str]:
    """The diagnosed record and its page, which are the same of the steps that are left."""
    found = [diagnose(record) for record in (whole, thinned)]
    assert repr(found[0].findings) == repr(found[1].findings)
    pages = [written(record, Typed("c.yaml", "", "/"), Look(80, color=False, unicode=True), "text") for record in found]
    assert pages[0] == pages[1]
    return found[1], pages[1]


def test_a_short_run_has_every_step() -> None:
    steps = logged(MOST_STEPS - 1, SKIPS)
    assert [step.step for step in steps] == list(range(MOST_STEPS - 1))


def test_a_long_run_keeps_its_ends_and_what_is_telling_with_its_neighbours() -> None:
    count = 20_000
    steps = logged(count, SKIPS)
    kept = {step.step: step for step in steps}
    assert list(kept) == sorted(kept)
    assert len(kept) <= MOST_STEPS
    assert kept.keys() >= {*range(STEPS_AT_ENDS), *range(count - STEPS_AT_ENDS, count)}
    assert [step.step for step in steps if step.skipped] == list(SKIPS)
    assert kept.keys() >= {5_002, 5_003, 5_004, 5_005, 5_006, 5_015, 5_016, 5_017, 18_999, 19_001}
    between = sorted(number for number in kept if 6_000 < number < 18_000)
    assert max(after - before for before, after in pairwise(between)) == 64
    assert len(to_json(record_of(steps))) < 600_000


def test_what_is_said_of_it_counts_every_step() -> None:
    whole = tuple(
        Step(number, 2.0 - number / 20_000, 65536.0, found_inf=number in SKIPS, skipped=number in SKIPS)
        for number in range(20_000)
    )
    thinned = tuple(step for step in whole if step.step % 16 == 0 or any(abs(step.step - skip) < 2 for skip in SKIPS))
    thinned += whole[thinned[-1].step + 1 :]
    record, page = same_of(record_of(whole), record_of(thinned))
    assert "20,000 steps" in page
    assert replace(record, steps=()).steps_run == 0


@pytest.mark.slow
def test_what_is_said_of_a_run_that_always_fails_counts_every_step_too() -> None:
    count = 9_000
    whole = tuple(Step(number, math.nan, 2.0, found_inf=True, skipped=True, scaler=1) for number in range(count))
    log = StepLog(torch.nn.Linear(1, 1), None)
    for _ in whole:
        log.add_losses({"loss": torch.tensor(math.nan)}, 1.0)
        log.close(OpenStep(scale=torch.tensor(2.0), skipped=True, number=1))
    thinned = replace(record_of(log.steps), left_out=log.left_out)
    assert len(thinned.steps) < count
    record, page = same_of(record_of(whole), thinned)
    assert f"not finite in {count} of {count} steps" in record.findings[0].message
    assert "9,000 skipped" in page
