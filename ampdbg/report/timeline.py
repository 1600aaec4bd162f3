"""A run in a few numbers: steps, skips, first and last loss, loss scale and gradient norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampdbg.record.run import Record, Step


@dataclass(frozen=True)
class Timeline:
    """The steps of a record (at least one), counted. ``bad_loss`` holds the steps with a non-finite loss."""

    steps: int
    skipped: tuple[Step, ...]
    bad_loss: tuple[Step, ...]
    first: Step
    last: Step
    lowest_scale: float


def timeline(record: Record) -> Timeline | None:
    """Counts the record's steps; None when there are none."""
    steps = record.steps
    if not steps:
        return None
    return Timeline(
        steps=len(steps),
        skipped=tuple(step for step in steps if step.skipped),
        bad_loss=tuple(step for step in steps if not math.isfinite(step.loss)),
        first=steps[0],
        last=steps[-1],
        lowest_scale=min(step.scale for step in steps),
    )
