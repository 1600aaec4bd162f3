"""Tests of the steps that a record keeps of a long run: all that the report needs, within a bounded size."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes.open_step import Gradients, OpenStep
from ampdbg.probes.steps import LISTED_PARAMETERS, LISTED_STEPS, MOST_STEPS, STEPS_AT_ENDS, StepLog
from ampdbg.probes.tensors import scalar_of
from ampdbg.probes.watch import watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import GroupOverflow, ParameterCounts, Record, Step, Unseen
from ampdbg.report.formats import written
from ampdbg.report.view import CommandContext, Look
from tests.report.records import ENVIRONMENT, healthy

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
    """The losses of a step in which 1.0 went backward before its optimizer called the closure once per run."""
    step = OpenStep(backward_losses=[1.0])
    step.begin_bare(1)
    for loss in runs:
        step.add_losses([scalar_of(torch.tensor(loss, device=device))])
    return step.backward_losses


def test_the_first_loss_of_a_closure_counts_unless_the_last_is_nonfinite() -> None:
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


@pytest.mark.parametrize(
    ("parameters", "listed"),
    [(LISTED_PARAMETERS // 4, [True] * 4 + [False] * 2), (LISTED_PARAMETERS + 1, [True] + [False] * 5)],
    ids=["a quarter of those that are listed", "more than are listed, but for the first step"],
)
def test_the_parameters_listed_by_few_wide_steps_are_bounded(parameters: int, listed: list[bool]) -> None:
    wide = [group(index) for index in range(parameters)]
    assert [bool(step.groups) for step in logged([wide] * 6).steps] == listed


def test_the_diagnosis_names_the_narrowest_listed_step() -> None:
    wide = [group(index) for index in range(8)]
    hits = [wide] * (LISTED_STEPS - 1) + [[group(1), group(2)]] + [[group(3)]] * LISTED_STEPS
    record = diagnose(replace(run(hits, 40), verdict="inconclusive"))
    [unknown] = [finding for finding in record.findings if finding.code == "unknown"]
    assert unknown.evidence["narrowest_step"] == LISTED_STEPS - 1
    assert unknown.evidence["groups"] == [group(1).name, group(2).name]


def test_healthy_steps_are_not_counted_as_left_out() -> None:
    log = logged([[], [group(1)], []])
    assert [step.groups_hit for step in log.steps] == [0, 0, 0]
    assert log.notes == ()


def test_a_watched_loop_that_never_recovers_notes_the_steps_left_out() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [one]} for one in model.parameters()], lr=0.1)
    scaler = GradScaler("cpu")
    with watch(model, optimizer) as seen:
        for _ in range(LISTED_STEPS + 20):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * math.inf).backward()
            scaler.step(optimizer)
            scaler.update()
    record = seen.record()
    assert [bool(step.groups) for step in record.steps] == [True] * LISTED_STEPS + [False] * 20
    assert [step.groups_hit for step in record.steps] == [0] * LISTED_STEPS + [2] * 20
    says = f"this run lists the groups of {LISTED_STEPS} of {LISTED_STEPS + 20} non-finite steps"
    assert record.unseen.notes == seen.notes == (says,)


SKIPS = {0: 65536.0, 5_003: 65536.0, 5_005: 65536.0, 19_000: 65536.0}


def long_run(count: int, skips: dict[int, float]) -> tuple[Step, ...]:
    """The steps that the log of a run keeps. After each skip the scale is half as large for ten steps."""
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
    return Record("scan", "2026", ENVIRONMENT, {}, "inconclusive", steps, planned_steps=steps[-1].step + 1)


def assert_same_report(whole: Record, thinned: Record) -> tuple[Record, str]:
    """Asserts that both records give the same findings and page. Returns the diagnosed thinned record and the page."""
    found = [diagnose(record) for record in (whole, thinned)]
    assert repr(found[0].findings) == repr(found[1].findings)
    pages = [
        written(record, CommandContext("c.yaml", "", "/"), Look(80, color=False, unicode=True), "text")
        for record in found
    ]
    assert pages[0] == pages[1]
    return found[1], pages[1]


def test_a_short_run_has_every_step() -> None:
    steps = long_run(MOST_STEPS - 1, SKIPS)
    assert [step.step for step in steps] == list(range(MOST_STEPS - 1))


def test_a_long_run_keeps_its_ends_and_its_skips_with_their_neighbours() -> None:
    count = 20_000
    steps = long_run(count, SKIPS)
    kept = {step.step: step for step in steps}
    assert list(kept) == sorted(kept)
    assert len(kept) <= MOST_STEPS
    assert kept.keys() >= {*range(STEPS_AT_ENDS), *range(count - STEPS_AT_ENDS, count)}
    assert [step.step for step in steps if step.skipped] == list(SKIPS)
    assert kept.keys() >= {5_002, 5_003, 5_004, 5_005, 5_006, 5_015, 5_016, 5_017, 18_999, 19_001}
    between = sorted(number for number in kept if 6_000 < number < 18_000)
    assert max(after - before for before, after in pairwise(between)) == 64
    assert len(to_json(record_of(steps))) < 600_000


def test_the_report_of_a_thinned_run_counts_every_step() -> None:
    whole = tuple(
        Step(number, 2.0 - number / 20_000, 65536.0, found_inf=number in SKIPS, skipped=number in SKIPS)
        for number in range(20_000)
    )
    thinned = tuple(step for step in whole if step.step % 16 == 0 or any(abs(step.step - skip) < 2 for skip in SKIPS))
    thinned += whole[thinned[-1].step + 1 :]
    record, page = assert_same_report(record_of(whole), record_of(thinned))
    assert "20,000 steps" in page
    assert replace(record, steps=()).steps_run == 0


@pytest.mark.slow
def test_the_report_of_a_thinned_run_that_always_fails_counts_every_step() -> None:
    count = 9_000
    whole = tuple(Step(number, math.nan, 2.0, found_inf=True, skipped=True, scaler=1) for number in range(count))
    log = StepLog(torch.nn.Linear(1, 1), None)
    for _ in whole:
        log.add_losses({"loss": torch.tensor(math.nan)}, 1.0)
        log.close(OpenStep(scale=torch.tensor(2.0), skipped=True, number=1))
    thinned = replace(record_of(log.steps), left_out=log.left_out)
    assert len(thinned.steps) < count
    record, page = assert_same_report(record_of(whole), thinned)
    assert f"not finite in {count} of {count} steps" in record.findings[0].message
    assert "9,000 skipped" in page


OWN_SCALES = {
    "a large power of two": (1024.0, 7.0, 5.0, False, 1024.0),
    "a large power of two, in a step that is withheld": (1024.0, math.inf, None, True, 1024.0),
    "a batch size": (64.0, 5.0, 5.0, False, 1.0),
    "a small power of two": (4.0, 5.0, 5.0, False, 1.0),
    "divided by again": (1000.0, 5000.0, 5.0, False, 1000.0),
    "divided by again, rounded": (1000.0, 5010.0, 5.0, False, 1000.0),
    "a weight": (1000.0, 5.0, 5.0, False, 1.0),
    "a weight, with gradients of zero": (1000.0, 0.0, 0.0, False, 1.0),
    "a weight, with gradients that are lost": (1000.0, math.inf, math.inf, False, 1.0),
    "a weight, in a step that is withheld": (1000.0, math.inf, None, True, 1.0),
    "none": (1.0, 5.0, 5.0, False, 1.0),
}


@pytest.mark.parametrize(("factor", "left", "norm", "skipped", "own"), OWN_SCALES.values(), ids=OWN_SCALES)
def test_a_factor_of_the_loss_is_a_loss_scale_only_if_the_loop_divides_by_it(
    factor: float, left: float, norm: float | None, skipped: bool, own: float
) -> None:
    log = StepLog(torch.nn.Linear(1, 1), on_step=None)
    norms = [] if norm is None else [norm]
    log.close(_open(factor, left, norms, skipped=skipped))
    assert (log.steps[0].scale, log.steps[0].loss) == (own, 3.0 * factor / own)
    if own == factor > 1.0:  # from then on, skipped steps are skipped at such a scale
        log.close(_open(factor + 1.0, math.inf, [], skipped=True))
        assert (log.steps[1].scale, log.steps[1].loss) == (factor + 1.0, 3.0)


def _open(factor: float, left: float, norms: list[float], *, skipped: bool) -> OpenStep:
    """A step with a loss of 3, which the loop multiplied by the factor."""
    gradients = {number: Gradients(norm) for number, norm in enumerate(norms)}
    return OpenStep(
        backward_losses=[3.0 * factor], gradients=gradients, left_norms={0: [left]}, factor=factor, skipped=skipped
    )
