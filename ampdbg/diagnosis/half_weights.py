"""Findings about half parameters: an update that spoils them, and updates too small to move them."""

from __future__ import annotations

from collections.abc import Iterator

from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record

MOST_OF_THE_UPDATE = 0.5
"""Where a larger share of the updates' sum of squares moves no weight, training stands still."""

CODE = "optimizer-underflow"

LARGER_EPS = ", or use an eps that half holds: eps=1e-6 (it changes the updates slightly)"


def spoilt_weights(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: an update of half weights that is not finite, where FP32's is."""
    seen = record.half_updates
    if seen is None or seen.spoilt_step is None or not seen.spoilt:
        return
    why = f": eps={seen.vanishing_eps:g} is 0 in half" if seen.vanishing_eps else ""
    yield finding_of(
        CODE,
        seen.spoilt_step,
        "optimizer",
        f"the update of step {seen.spoilt_step} makes {_counted(seen.spoilt)} non-finite although all "
        f"gradients are finite, and so is the same update in FP32{why}",
        parameter=seen.spoilt[0],
        remedy=CODES[CODE].remedy + (LARGER_EPS if seen.vanishing_eps else ""),
        evidence={"parameters": list(seen.spoilt[:20]), "eps": seen.vanishing_eps},
    )


def lost_updates(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: updates so small that half weights round back to where they were."""
    seen = record.half_updates
    if seen is None or not seen.lost or (seen.lost_energy or 0.0) <= MOST_OF_THE_UPDATE:
        return
    yield finding_of(
        CODE,
        record.steps[0].step,
        "optimizer",
        f"{seen.steps} steps lose {seen.lost_energy:.0%} of the updates' energy, most of it in "
        f"{_counted(seen.lost)}: "
        "half weights cannot move by less than half a unit in their last place",
        parameter=seen.lost[0],
        evidence={"parameters": list(seen.lost[:20]), "lost_energy": seen.lost_energy},
    )


def _counted(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more half parameters"
