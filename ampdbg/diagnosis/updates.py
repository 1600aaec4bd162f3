"""Findings about the updates of weights that are stored in half precision."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ampdbg.quantities import counted, listed, number
from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import FrozenParameter, Record, Step

SMALL_UPDATES, FROZEN = "optimizer-underflow", "frozen-weights"

FALLS = 0.9
"""A loss whose mean falls below this share of what it was at first is said to fall."""

MOST_OF_THE_UPDATE = 0.5
"""Where a larger share of the updates' sum of squares moves no weight, training stands still."""

LARGER_EPS = ", or use an eps that half holds: eps=1e-6 (it changes the updates slightly)"


def spoilt_weights(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: an update of half weights that is not finite, where FP32's is."""
    seen = record.half_updates
    if seen is None or seen.spoilt_step is None or not seen.spoilt:
        return
    why = f": eps={seen.vanishing_eps:g} is 0 in half" if seen.vanishing_eps else ""
    yield finding_of(
        SMALL_UPDATES,
        seen.spoilt_step,
        "optimizer",
        f"the update of step {seen.spoilt_step} makes {_named(seen.spoilt)} non-finite although all "
        f"gradients are finite, and so is the same update in FP32{why}",
        parameter=seen.spoilt[0],
        remedy=CODES[SMALL_UPDATES].remedy + (LARGER_EPS if seen.vanishing_eps else ""),
        evidence={"parameters": list(seen.spoilt[:20]), "eps": seen.vanishing_eps},
    )


def lost_updates(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: updates so small that half weights round back to where they were."""
    seen = record.half_updates
    if seen is None or not seen.lost or (seen.lost_energy or 0.0) <= MOST_OF_THE_UPDATE:
        return
    yield finding_of(
        SMALL_UPDATES,
        record.steps[0].step,
        "optimizer",
        f"{seen.steps} steps lose {seen.lost_energy:.0%} of the updates' energy, most of it in "
        f"{_named(seen.lost)}: "
        "half weights cannot move by less than half a unit in their last place",
        parameter=seen.lost[0],
        evidence={"parameters": list(seen.lost[:20]), "lost_energy": seen.lost_energy},
    )


def frozen_weights(record: Record) -> Iterator[Finding]:
    """``frozen-weights``: bfloat16 weights that stay where they are, step after step."""
    seen = record.half_updates
    if seen is None or not seen.frozen:
        return
    worst = sorted(seen.frozen, key=lambda one: (-one.still, -one.unmoved))
    many = f"in {counted(seen.steps, 'step')} {counted(len(worst), 'bfloat16 parameter')} lose most of their updates"
    parts = {"gradient's part": seen.lost_gradient, "weight decay": seen.lost_decay}
    apart = listed([f"{value:.0%} of the {what}" for what, value in parts.items() if value is not None])
    lost = f"{seen.lost_energy or 0.0:.0%} of all updates' energy is lost{f' ({apart})' if apart else ''}"
    yield finding_of(
        FROZEN,
        record.steps[0].step,
        "optimizer",
        f"{many}, first of all {_still(worst[0], seen.steps)}; {lost}{_falls(record.steps)}",
        severity="warning",
        parameter=worst[0].name,
        evidence={
            "parameters": [one.name for one in worst[:20]],
            "lost_energy": seen.lost_energy,
            "lost_gradient": seen.lost_gradient,
            "lost_decay": seen.lost_decay,
        },
    )


def _still(one: FrozenParameter, steps: int) -> str:
    if one.still == steps:
        return f"{one.name}, of which no entry ever moves"
    return f"{one.name}, of which {one.unmoved:.0%} of the entries stay where they are in a step"


def _falls(steps: Sequence[Step]) -> str:
    """What speaks for a run that goes on learning with the weights that do move."""
    tenth = len(steps) // 10 or 1
    first, last = (statistics.fmean(step.loss for step in some) for some in (steps[:tenth], steps[-tenth:]))
    return f"; the loss falls from {number(first)} to {number(last)} all the same" if last < FALLS * first else ""


def _named(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more half parameters"
