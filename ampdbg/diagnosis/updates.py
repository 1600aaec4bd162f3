"""Findings about the updates of half parameters, from the ledger that holds them against float32 masters."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ampdbg.quantities import counted, listed, number
from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import FrozenParameter, Record, Step, Updates

SMALL_UPDATES, FROZEN = "optimizer-underflow", "frozen-weights"
STUCK, ACCUMULATION = "stuck-moment", "lost-accumulation"

FALLS = 0.9
"""A loss whose mean falls below this share of what it was at first is said to fall."""

MOST_OF_THE_UPDATE = 0.5
"""Where a larger share of the way is lost, training stands still."""

A_PART = 0.1
"""A weight decay that makes a smaller share of the updates' energy is not missed within some steps."""

LOST_OF_A_SUM = 0.1
"""A sum of gradients that is further from float32's, relative to that, is lost in part."""

LARGER_EPS = ", or use an eps that half holds: eps=1e-6 (it changes the updates slightly)"


def spoilt_weights(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: an update of half weights that is not finite, where FP32's is."""
    seen = record.updates
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


def frozen_weights(record: Record) -> Iterator[Finding]:
    """``frozen-weights``: half weights that stay where they are, step after step."""
    seen = record.updates
    if seen is None or not seen.frozen:
        return
    worst = sorted(seen.frozen, key=lambda one: (one.moved > 0, -one.lost))
    yield finding_of(
        FROZEN,
        record.steps[0].step,
        "optimizer",
        f"{counted(len(worst), 'half parameter')} hardly moved in {counted(seen.steps, 'sampled step')}: "
        f"{listed(map(_still, worst), most=3)}; {_shares(seen)}{_falls(record.steps)}{_forecast(seen)}",
        parameter=worst[0].name,
        evidence=_evidence(seen, [one.name for one in worst]),
    )


def lost_updates(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: updates so small that half weights lose most of them, though no parameter all."""
    seen = record.updates
    if seen is None or seen.frozen or (seen.lost or 0.0) <= MOST_OF_THE_UPDATE:
        return
    by_gradient = (seen.lost_gradient or 0.0) > MOST_OF_THE_UPDATE
    if not by_gradient and seen.decay < A_PART:
        return
    what = "updates are" if by_gradient else "weight decay is"
    yield finding_of(
        SMALL_UPDATES,
        record.steps[0].step,
        "optimizer",
        f"in {counted(seen.steps, 'sampled step')} {_shares(seen)}: the {what} mostly below half a unit in the last "
        f"place of the weights{_forecast(seen)}",
        severity="warning",
        evidence=_evidence(seen, []),
    )


def stuck_moment(record: Record) -> Iterator[Finding]:
    """``stuck-moment``: a second moment in half that cannot decay, and is far from float32's."""
    seen = record.updates
    if seen is None or not seen.stuck:
        return
    worst = max(seen.stuck, key=lambda one: one.times)
    too = "large" if worst.is_too_large else "small"
    yield finding_of(
        STUCK,
        record.steps[-1].step,
        "optimizer",
        f"the second moments of {_named([one.parameter for one in seen.stuck])} stick: with beta2 = {worst.beta:g} a "
        f"step takes {1.0 - worst.beta:.1%} off, which rounds back; after {counted(worst.steps, 'step')} they are "
        f"{worst.times:.3g} times too {too}, and the updates {worst.times**0.5:.2g} times too "
        f"{'small' if worst.is_too_large else 'large'}",
        severity="warning",
        parameter=worst.parameter,
        evidence={"parameters": [one.parameter for one in seen.stuck[:20]], "times": worst.times, "beta2": worst.beta},
    )


def lost_accumulation(record: Record) -> Iterator[Finding]:
    """``lost-accumulation``: gradients of many backward passes that half cannot add up."""
    seen = record.updates
    if seen is None or (seen.lost_accumulation or 0.0) <= LOST_OF_A_SUM:
        return
    yield finding_of(
        ACCUMULATION,
        record.steps[0].step,
        "optimizer",
        f"the sum of {seen.passes} gradients in half is {seen.lost_accumulation:.0%} from what it is in float32: a "
        "gradient below half a unit in the last place of the sum is not added",
        severity="warning",
        evidence={"lost": seen.lost_accumulation, "passes": seen.passes},
    )


def _still(one: FrozenParameter) -> str:
    return f"of {one.name} {one.moved} of {counted(one.entries, 'value')}"


def _shares(seen: Updates) -> str:
    parts = {"gradient's part": seen.lost_gradient, "weight decay": seen.lost_decay}
    apart = listed([f"{value:.0%} of the {what}" for what, value in parts.items() if value is not None])
    return f"{seen.lost or 0.0:.0%} of the way that float32 weights go is lost ({apart})"


def _forecast(seen: Updates) -> str:
    """Below which learning rate the updates of most entries of each kind are lost."""
    rates = {one.kind: one.freezes_below for one in sorted(seen.kinds, key=lambda one: -(one.freezes_below or 0.0))}
    known = [f"{number(rate)} ({kind})" for kind, rate in rates.items() if rate is not None]
    return f"; most values stand still at learning rates below {listed(known)}" if known else ""


def _falls(steps: Sequence[Step]) -> str:
    """What speaks for a run that goes on learning with the weights that do move."""
    tenth = len(steps) // 10 or 1
    first, last = (statistics.fmean(step.loss for step in some) for some in (steps[:tenth], steps[-tenth:]))
    return f"; the loss falls from {number(first)} to {number(last)} all the same" if last < FALLS * first else ""


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more half parameters"


def _evidence(seen: Updates, names: Sequence[str]) -> dict[str, object]:
    lost = {"lost": seen.lost, "lost_gradient": seen.lost_gradient, "lost_decay": seen.lost_decay}
    return {"parameters": list(names[:20]), **lost}
