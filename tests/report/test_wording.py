"""What the report may not say: a NaN is never called an overflow, and precision is not blamed for it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from ampdbg.record.run import GroupOverflow, Record, Step
from tests.report.pages import rendered
from tests.strategies import records


def nan_only(record: Record) -> Record:
    """The record with every inf made a NaN, and nothing said about it yet."""
    return replace(record, steps=tuple(map(_step, record.steps)), findings=())


def _step(step: Step) -> Step:
    return replace(
        step,
        groups=tuple(map(_group, step.groups)),
        nonfinite=tuple(replace(counts, inf=0, nan=counts.inf + counts.nan) for counts in step.nonfinite),
    )


def _group(group: GroupOverflow) -> GroupOverflow:
    return replace(
        group, parameters=tuple(replace(counts, inf=0, nan=counts.inf + counts.nan) for counts in group.parameters)
    )


@given(records())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_run_with_nan_alone_is_reported_without_the_word_overflow(record: Record) -> None:
    text = rendered(nan_only(record), width=100)
    assert "overflow" not in text.lower()
