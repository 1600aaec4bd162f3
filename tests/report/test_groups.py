"""Which groups overflowed: what is told apart, how it is sorted, what is summed."""

from __future__ import annotations

from dataclasses import replace

from ampdbg.record.run import GroupOverflow, ParameterCounts, Unseen
from ampdbg.report.scan import GroupHits, group_hits, overflows
from tests.report.records import NAMES, healthy_step, overflow, run, skipped_step

EVERY = range(len(NAMES))


def test_a_step_that_hits_every_group_is_told_apart_from_one_that_hits_few() -> None:
    seen = overflows(run([skipped_step(0, 4.0, overflow(*EVERY)), skipped_step(1, 2.0, overflow(3)), healthy_step(2)]))
    assert [step.step for step in seen.everywhere] == [0]
    assert [step.step for step in seen.local] == [1]
    assert [(hit.name, hit.steps, hit.first) for hit in seen.hits] == [(NAMES[3], 1, 1)]


def test_a_tenth_of_the_groups_may_be_spared() -> None:
    steps = [skipped_step(0, 4.0, overflow(*range(35))), skipped_step(1, 2.0, overflow(*range(34)))]
    seen = overflows(run(steps))
    assert [step.step for step in seen.everywhere] == [0]


def test_a_parameter_without_a_gradient_cannot_be_hit() -> None:
    step = skipped_step(0, 4.0, overflow(*range(28)))
    untrained = Unseen(parameters_without_gradient=NAMES[30:])
    assert overflows(run([step], unseen=untrained)).everywhere == (step,)
    assert overflows(run([step])).local == (step,)


def test_a_model_of_few_groups_is_told_group_by_group() -> None:
    seen = overflows(run([skipped_step(0, 4.0, overflow(0, 1))], groups=NAMES[:2]))
    assert not seen.everywhere
    assert len(seen.hits) == 2


def test_the_narrowest_step_is_the_earliest_with_the_fewest_groups() -> None:
    steps = [skipped_step(number, 4.0, overflow(*range(count))) for number, count in enumerate((5, 2, 3, 2))]
    narrowest = overflows(run(steps)).narrowest
    assert narrowest is not None
    assert narrowest.step == 1


def test_groups_are_sorted_by_first_step_then_most_often_then_place() -> None:
    steps = [
        skipped_step(0, 4.0, overflow(5, 6, 7)),
        skipped_step(1, 4.0, overflow(1, 6)),
        skipped_step(2, 4.0, overflow(1)),
    ]
    assert [(hit.index, hit.first, hit.steps) for hit in group_hits(steps)] == [
        (6, 0, 2),
        (5, 0, 1),
        (7, 0, 1),
        (1, 1, 2),
    ]


def test_counts_are_those_of_the_worst_step() -> None:
    mild = GroupOverflow(0, "net", (ParameterCounts("net.bias", 1, 0, 10),))
    bad = GroupOverflow(0, "net", (ParameterCounts("net.bias", 1, 1, 10), ParameterCounts("net.weight", 40, 50, 100)))
    steps = [skipped_step(0, 4.0, (mild,)), skipped_step(1, 2.0, (bad,)), skipped_step(2, 1.0, (mild,))]
    assert group_hits(steps) == (
        GroupHits(index=0, name="net", steps=3, first=0, inf=41, nan=51, size=110, worst="net.weight"),
    )


def test_groups_of_the_same_name_stay_apart() -> None:
    twins = tuple(replace(group, name="0") for group in overflow(0, 1))
    assert [hit.index for hit in group_hits([skipped_step(0, 4.0, twins)])] == [0, 1]


def test_a_run_without_overflow_has_none() -> None:
    seen = overflows(run([healthy_step(0)]))
    assert (seen.everywhere, seen.local, seen.hits, seen.narrowest) == ((), (), (), None)
