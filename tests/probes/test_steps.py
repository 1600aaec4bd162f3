"""What the record keeps of thousands of unhealthy steps: enough for the report, and little enough for the disk."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes.open_step import OpenStep
from ampdbg.probes.steps import LISTED_PARAMETERS, LISTED_STEPS, StepLog
from ampdbg.probes.watch import watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import GroupOverflow, ParameterCounts, Record, Unseen
from tests.report.records import healthy

PARAMETERS = 2_000
STEPS = 2_000


def group(index: int) -> GroupOverflow:
    name = f"backbone.stages.{index // 100}.blocks.{index}.attention.output.dense.weight"
    return GroupOverflow(index, name, (ParameterCounts(name, 1, 0, 100),))


def logged(hits: list[list[GroupOverflow]]) -> StepLog:
    """A log of one step for each of ``hits``."""
    log = StepLog(torch.nn.Linear(1, 1), on_step=None)
    for groups in hits:
        log.close(OpenStep(groups=groups, skipped=bool(groups)))
    return log


def run(hits: list[list[GroupOverflow]], total: int) -> Record:
    log = logged(hits)
    names = tuple(group(index).name for index in range(total))
    steps = tuple(replace(step, loss=0.5, scale=1024.0) for step in log.steps)
    return replace(healthy(), steps=steps, groups=names, unseen=Unseen(notes=log.notes))


def losses_of_closure(runs: list[float], device: str = "cpu") -> list[Any]:
    """Those of a step in which 1.0 went backward before its optimizer ran the closure so often."""
    step = OpenStep(scaled=[1.0])
    step.begin_bare(1)
    for loss in runs:
        step.add_losses(torch.tensor(loss, device=device))
    return step.scaled


def test_of_the_losses_of_a_closure_the_first_counts_unless_the_last_is_lost() -> None:
    assert losses_of_closure([5.0]) == [1.0, 5.0]
    assert losses_of_closure([5.0, 4.0, 3.0]) == [1.0, 5.0]
    assert losses_of_closure([5.0, math.inf, 3.0]) == [1.0, 5.0]  # a line search may have tried too long a step
    assert losses_of_closure([5.0, 4.0, math.inf]) == [1.0, math.inf]
    one, other = losses_of_closure([5.0, 4.0], device="meta")
    assert (one, other.shape, other.is_meta) == (1.0, (), True)  # as on a GPU: nothing is read


def test_thousands_of_bad_steps_of_thousands_of_parameters_stay_under_5_mb() -> None:
    everywhere = [group(index) for index in range(PARAMETERS)]
    record = run([everywhere if number % 2 else everywhere[::2] for number in range(STEPS)], PARAMETERS)
    text = to_json(record)
    assert len(text.encode()) < 5_000_000
    assert repr(from_json(text)) == repr(record)


def test_the_first_steps_list_their_groups_and_later_ones_count_them() -> None:
    log = logged([[group(3), group(7)] for _ in range(200)])
    assert [bool(step.groups) for step in log.steps] == [True] * LISTED_STEPS + [False] * 150
    assert [step.groups_hit for step in log.steps] == [0] * LISTED_STEPS + [2] * 150
    assert log.notes == (f"this run lists the groups of {LISTED_STEPS} of 200 non-finite steps",)


@pytest.mark.parametrize(
    ("parameters", "listed"),
    [(LISTED_PARAMETERS // 4, [True] * 4 + [False] * 2), (LISTED_PARAMETERS + 1, [True] + [False] * 5)],
    ids=["a quarter of those that are listed", "more than are listed, but for the first step"],
)
def test_few_steps_of_many_parameters_are_bounded_too(parameters: int, listed: list[bool]) -> None:
    wide = [group(index) for index in range(parameters)]
    assert [bool(step.groups) for step in logged([wide] * 6).steps] == listed


def test_the_diagnosis_names_the_narrowest_step_that_is_listed() -> None:
    wide = [group(index) for index in range(8)]
    hits = [wide] * (LISTED_STEPS - 1) + [[group(1), group(2)]] + [[group(3)]] * LISTED_STEPS
    record = diagnose(replace(run(hits, 40), verdict="inconclusive"))
    [unknown] = [finding for finding in record.findings if finding.code == "unknown"]
    assert unknown.evidence["narrowest_step"] == LISTED_STEPS - 1
    assert unknown.evidence["groups"] == [group(1).name, group(2).name]


def test_a_healthy_step_is_no_part_of_it() -> None:
    log = logged([[], [group(1)], []])
    assert [step.groups_hit for step in log.steps] == [0, 0, 0]
    assert log.notes == ()


def test_a_watched_loop_that_never_recovers_says_what_it_leaves_out() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    with watch(model, optimizer) as seen:
        for _ in range(LISTED_STEPS + 20):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * math.inf).backward()
            scaler.step(optimizer)
            scaler.update()
    record = seen.record()
    assert [bool(step.groups) for step in record.steps] == [True] * LISTED_STEPS + [False] * 20
    assert {step.groups_hit for step in record.steps} == {0, 1}
    assert record.unseen.notes == seen.notes
    assert len(seen.notes) == 1
