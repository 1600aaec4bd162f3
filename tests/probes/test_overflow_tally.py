"""What the record keeps of thousands of unhealthy steps: enough for the report, and little enough for the disk."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import torch
from rich.console import Console
from torch.amp.grad_scaler import GradScaler

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes.overflow_tally import DETAILED_PARAMETERS, DETAILED_STEPS, OverflowTally
from ampdbg.probes.watch import watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import GroupOverflow, GroupTotal, ParameterCounts, Record, Step, Unseen
from ampdbg.report.group_text import groups_text
from ampdbg.report.groups import overflows
from tests.report.records import healthy

PARAMETERS = 2_000
STEPS = 2_000


def group(index: int, inf: int = 1) -> GroupOverflow:
    name = f"backbone.stages.{index // 100}.blocks.{index}.attention.output.dense.weight"
    return GroupOverflow(index, name, (ParameterCounts(name, inf, 0, 100),))


def run(hits: list[list[GroupOverflow]], total: int) -> Record:
    """A record of one unhealthy step for each of ``hits``."""
    tally = OverflowTally()
    steps = []
    for number, groups in enumerate(hits):
        listed, hit = tally.kept(number, groups, total, total)
        steps.append(Step(number, 0.5123, 1024.0, True, True, math.inf, listed, groups_hit=hit))
    return replace(
        healthy(),
        steps=tuple(steps),
        groups=tuple(group(index).name for index in range(total)),
        group_totals=tally.totals,
        unseen=Unseen(notes=tally.notes),
    )


def text_of(record: Record) -> str:
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as capture:
        for part in groups_text(record, overflows(record)):
            console.print(part)
    return capture.get()


def test_thousands_of_bad_steps_of_thousands_of_parameters_stay_under_5_mb() -> None:
    everywhere = [group(index) for index in range(PARAMETERS)]
    # One step in two hits half of the groups: nothing is listed, everything is in the totals.
    record = run([everywhere if number % 2 else everywhere[::2] for number in range(STEPS)], PARAMETERS)
    text = to_json(record)
    assert len(text.encode()) < 5_000_000
    assert repr(from_json(text)) == repr(record)
    seen = overflows(record)
    assert (len(seen.everywhere), len(seen.local)) == (STEPS // 2, STEPS // 2)
    assert len(seen.hits) == PARAMETERS // 2
    assert {hit.steps for hit in seen.hits} == {STEPS // 2}
    assert {hit.first for hit in seen.hits} == {0}
    [note] = record.unseen.notes
    assert note.startswith(f"of {STEPS} steps with non-finite gradients only ")


def test_the_report_counts_listed_and_unlisted_steps_alike() -> None:
    record = run([[group(3, inf=10 + number), group(7)] for number in range(200)], 40)
    assert sum(bool(step.groups) for step in record.steps) == DETAILED_STEPS
    text = text_of(record)
    assert "Non-finite gradients, in 200 of 200 steps" in text
    [third, seventh] = [line.split() for line in text.splitlines() if "attention" in line and "200 of 200" in line]
    # The worst step is the last one, which is not listed.
    assert third[4:7] == ["0", "209", "0"]
    assert seventh[4:7] == ["0", "1", "0"]


def test_steps_that_hit_every_group_are_counted_without_being_listed() -> None:
    record = run([[group(index) for index in range(40)] for _ in range(300)], 40)
    assert record.group_totals == ()
    assert "All 40 groups at once in 300 steps, first at step 0." in text_of(record)


def test_a_later_step_that_is_narrower_than_all_before_is_listed() -> None:
    hits = [[group(index) for index in range(5)] for _ in range(DETAILED_STEPS + 10)] + [[group(2)]]
    record = run(hits, 40)
    assert record.steps[-1].groups == (group(2),)
    assert overflows(record).narrowest == record.steps[-1]


def test_few_parameters_of_many_steps_are_bounded_too() -> None:
    tally = OverflowTally()
    wide = [group(index) for index in range(DETAILED_PARAMETERS // 4)]
    kept = [bool(tally.kept(number, wide, 20_000, 20_000)[0]) for number in range(6)]
    assert kept == [True] * 4 + [False] * 2
    assert tally.totals[0] == GroupTotal(0, group(0).name, 2, 4, 1, 0, 100, group(0).name, 1)


def test_the_first_step_is_listed_however_many_parameters_it_has() -> None:
    tally = OverflowTally()
    wide = [group(index) for index in range(DETAILED_PARAMETERS + 1)]
    assert [bool(tally.kept(number, wide, 20_000, 20_000)[0]) for number in range(3)] == [True, False, False]


def test_the_diagnosis_names_the_narrowest_step_that_is_listed() -> None:
    hits = [[group(index) for index in range(8)] for _ in range(DETAILED_STEPS)] + [[group(1), group(2)]] * 40
    record = diagnose(replace(run(hits, 40), verdict="inconclusive"))
    [unknown] = [finding for finding in record.findings if finding.code == "unknown"]
    assert unknown.evidence["narrowest_step"] == DETAILED_STEPS
    assert unknown.evidence["groups"] == [group(1).name, group(2).name]


def test_a_healthy_step_and_an_empty_one_are_no_part_of_it() -> None:
    tally = OverflowTally()
    assert tally.kept(0, [], 10, 10) == ((), 0)
    assert (tally.totals, tally.notes) == ((), ())


def test_a_watched_loop_that_never_recovers_says_what_it_leaves_out() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    with watch(model, optimizer) as seen:
        for _ in range(DETAILED_STEPS + 20):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * math.inf).backward()
            scaler.step(optimizer)
            scaler.update()
    record = seen.record()
    assert [bool(step.groups) for step in record.steps] == [True] * DETAILED_STEPS + [False] * 20
    assert {step.groups_hit for step in record.steps} == {0, 1}
    assert record.group_totals[0].steps == 20
    assert record.unseen.notes == seen.notes
    assert len(seen.notes) == 1
