"""A loss scale that is raised so often, by its scaler or by a new one, that much of the training is lost to it (no
torch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, takewhile
from math import isfinite
from operator import attrgetter
from statistics import mode

from ampdbg import quantities
from ampdbg.quantities import counted
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Step

OSCILLATION, RESTART = "scale-oscillation", "scale-restart"

GROWTH = 2.0
"""A scaler multiplies its scale by so much at a time, and divides it by so much (``GradScaler``'s own factors)."""

TOO_OFTEN = 8
"""More than one step in so many that is skipped because the scale has just grown is more than a try now and then."""

FEW_TRIES = 5
"""So few skips right behind a growth are no loss worth telling of."""


def just_grown(steps: Sequence[Step]) -> set[int]:
    """The numbers of the steps whose scale is larger than that of the step before."""
    return {now.step for before, now in pairwise(steps) if now.scale > before.scale}


def _tries(steps: Sequence[Step]) -> list[Step]:
    """The skipped steps whose scale had just grown."""
    grown = just_grown(steps)
    return [step for step in steps if step.skipped and step.step in grown]


def _are_many(tries: int, record: Record) -> bool:
    return tries > max(FEW_TRIES, record.steps_run // TOO_OFTEN)


def oscillation(record: Record) -> Finding | None:
    """``scale-oscillation``: how often the scale grows, and what its tries have cost; None where they are few, or
    where the scale falls all the same."""
    tries, taken = _tries(record.steps), [step.scale for step in record.steps if not step.skipped]
    if not (_are_many(len(tries), record) and taken and taken[-1] * GROWTH**2 >= taken[0]):
        return None
    interval = mode(_steps_to_grow(record.steps))
    behind = counted(interval, "taken step") if interval > 1 else "every taken step"
    return finding_of(
        OSCILLATION,
        tries[0].step,
        "backward",
        f"the loss scale grows after {behind} (growth_interval={interval}), and {len(tries):,} of "
        f"{record.steps_run:,} steps were skipped right behind that",
        evidence={"skipped": len(tries), "growth_interval": interval},
    )


def restart(record: Record) -> Finding | None:
    """``scale-restart``: how often a new scaler takes the place of the last, and what it costs until its scale has
    settled; None of one scaler, of scalers that take turns or have each their optimizer, and where little is lost."""
    first, *others = _scalers_in_a_row(record.steps)
    later = [steps for steps in others if any(step.succeeds for step in steps)]  # else of another model, as of a fold
    lost = [step for steps in later for step in takewhile(lambda step: step.skipped, steps) if isfinite(step.loss)]
    if not _are_many(len(lost), record):
        return None
    begun, taken = later[-1][0], [step.scale for step in record.steps if not step.skipped]
    apart = _apart([first, *later])
    found = finding_of(
        RESTART,
        lost[0].step,
        "backward",
        f"{len(later) + 1:,} scalers follow one another: a new one, at a loss scale of "
        f"{quantities.scale(begun.scale)}, every {counted(apart, 'step') if apart > 1 else 'step'}; {len(lost):,} of "
        f"{record.steps_run:,} steps were skipped while those behind the first settled",
        severity="warning" if taken else "error",
        evidence={"skipped": len(lost), "scalers": len(later) + 1},
    )
    at = f", or begin with GradScaler(init_scale={min(taken):g})" if taken and min(taken) < begun.scale else ""
    return replace(found, remedy=f"{found.remedy}{at}")


def _scalers_in_a_row(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of each scaler, in order; all in one where a scaler has come back, as where two take turns."""
    scaled = [step for step in steps if step.scaler]
    rows = [list(row) for _, row in groupby(scaled, attrgetter("scaler"))]
    return rows if len(rows) == len({step.scaler for step in scaled}) > 0 else [scaled]


def _apart(rows: Sequence[Sequence[Step]]) -> int:
    """How many steps lie between the beginnings of two scalers, most often."""
    return mode(now[0].step - before[0].step for before, now in pairwise(rows))


def _steps_to_grow(steps: Sequence[Step]) -> Iterator[int]:
    """How many steps were taken before each growth, since a skip or the growth before it."""
    taken = 0
    for before, now in pairwise(steps):
        taken = 0 if before.skipped else taken + now.step - before.step
        if now.scale > before.scale:
            yield taken
            taken = 0
