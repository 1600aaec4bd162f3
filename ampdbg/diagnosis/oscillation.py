"""A loss scale that is tried larger so often that much of the training is lost to it (no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import mode

from ampdbg.quantities import counted
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Step

OSCILLATION = "scale-oscillation"

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


def grows_too_often(record: Record) -> bool:
    """Whether much of the training is lost to tries of a larger scale, which else does not fall."""
    taken = [step.scale for step in record.steps if not step.skipped]
    are_many = len(_tries(record.steps)) > max(FEW_TRIES, record.steps_run // TOO_OFTEN)
    return are_many and bool(taken) and taken[-1] * GROWTH**2 >= taken[0]


def oscillation(record: Record) -> Finding:
    """``scale-oscillation``: how often the scale grows, and what its tries have cost."""
    tries, interval = _tries(record.steps), mode(_steps_to_grow(record.steps))
    behind = counted(interval, "taken step") if interval > 1 else "every taken step"
    return finding_of(
        OSCILLATION,
        tries[0].step,
        "backward",
        f"the loss scale grows after {behind} (growth_interval={interval}), and {len(tries):,} of "
        f"{record.steps_run:,} steps were skipped right behind that",
        evidence={"skipped": len(tries), "growth_interval": interval},
    )


def _steps_to_grow(steps: Sequence[Step]) -> Iterator[int]:
    """How many steps were taken before each growth, since a skip or the growth before it."""
    taken = 0
    for before, now in pairwise(steps):
        taken = 0 if before.skipped else taken + now.step - before.step
        if now.scale > before.scale:
            yield taken
            taken = 0
