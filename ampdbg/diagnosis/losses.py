"""Tests for rising losses and diverging runs: pure functions of a series of losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from ampdbg.quantities import number
from ampdbg.record.run import Step

DIVERGED = 10.0
"""Losses diverge if they climb by this multiple of their earlier range. Noise and hard batches do not."""

FEW_LOSSES = 5
"""Fewer losses do not show their range. Their magnitude then counts too."""

LEAPT = 1000.0
"""Losses this many times the first one have left it for good, although one loss shows no range."""

NOISE = 3.0
"""The losses of a rising run must climb this many times as far as one loss falls to the next."""

RISEN = 10.0
"""A healthy run gets a note if its losses stay this many times above all earlier losses."""

RISEN_NOTE = (
    "the loss rose from {} to {} and stays there, with nothing beyond a limit: check the learning rate, and "
    "compare with a run in FP32"
)

RESOLUTION = 1e-6
"""A change by a smaller share of a loss is rounding."""


def losses_of(steps: Iterable[Step]) -> list[float]:
    """Return the finite losses of the steps, scaled to the number of passes of the last step. Losses of exactly 0
    are omitted, such as a discriminator's before its training begins."""
    known = [step for step in steps if step.loss]
    return finite([step.loss / step.passes * known[-1].passes for step in known])


def finite(losses: Sequence[float]) -> list[float]:
    """Return the losses without inf and NaN."""
    return [loss for loss in losses if math.isfinite(loss)]


def _lowest_after(losses: Sequence[float]) -> list[float]:
    """Return for each position the minimum of the remaining losses."""
    return list(accumulate(reversed(losses), min))[::-1]


def _largest_fall_after(losses: Sequence[float]) -> list[float]:
    """Return for each position the largest later drop between two consecutive losses."""
    falls = [max(0.0, one - other) for one, other in pairwise(losses)]
    return [*list(accumulate(reversed(falls), max))[::-1], 0.0]


def rose(losses: Sequence[float], times: float = DIVERGED, *, are_of_batches: bool = False) -> bool:
    """True if from some step on all losses exceed all before by more than ``times`` the earlier range.

    A constant added to all losses, or a positive factor, changes nothing, since losses may be negative. Equal losses do
    not rise, and neither do alternating easy and hard batches. Two losses are not enough.

    If the losses ``are_of_batches`` that differ, the range of a few says little. Later losses must then climb several
    times as far as any of the first few falls to the next.
    """
    known = finite(losses)
    highest, lowest, after = list(accumulate(known, max)), list(accumulate(known, min)), _lowest_after(known)
    falls = _largest_fall_after(known)[:FEW_LOSSES] if are_of_batches else []
    return any(
        after[start] - top > max(times * (top - bottom), RESOLUTION * abs(top))
        and max(known[start:]) - top > NOISE * sum(falls[start : start + 1])
        for start, top, bottom in zip(range(2, len(known)), highest[1:], lowest[1:], strict=False)
    )


def leapt(losses: Sequence[float]) -> bool:
    """True if all losses after the first are many times as large."""
    first, *later = losses or [0.0]
    return bool(later and first) and min(later) > LEAPT * abs(first)


def may_have_risen(before: Sequence[float], now: float) -> bool:
    """True if the last loss or ``now`` is above the first loss. Otherwise nothing can have diverged."""
    known = finite(before)
    return bool(known) and any(loss > known[0] for loss in finite((known[-1], now)))


def climbs_on(before: Sequence[float], continuation: Sequence[float]) -> bool:
    """True if the losses of FP32 steps on one batch, which follow ``before``, diverge by themselves.

    They must climb steadily, or immediately reach another level. The climb must exceed the earlier range of the losses,
    and exceed it by far if those had not risen. If the continuation ends in inf or NaN, it must not fall. Its finite
    losses must be well above all losses before.
    """
    earlier, later = finite(before), finite(continuation)
    if not earlier or not later:
        return False
    climb = later[-1] - later[0]
    if len(later) < len(continuation):
        return climb >= 0 and (rose([*earlier, *later]) or leapt([*earlier, *later]))
    sizes = [abs(loss) for loss in earlier] if len(earlier) < FEW_LOSSES else [0.0]
    ranged = max(max(earlier) - min(earlier), *sizes)
    times = 1.0 if rose(earlier, times=1.0) else DIVERGED
    return (rose(later, times=1.0) or rose([min(earlier), *later])) and climb > times * ranged


def risen(losses: Sequence[float]) -> str:
    """Return a note if the losses stay far above the magnitude of all earlier losses; else "". It is only a note,
    because some losses are meant to grow."""
    known = finite(losses)
    highest, after = list(accumulate(map(abs, known), max)), _lowest_after(known)
    starts = range(1 if leapt(known) else 2, len(known) - 1)
    start = next((start for start in starts if after[start] > RISEN * highest[start - 1]), None)
    return "" if start is None else RISEN_NOTE.format(number(known[start - 1]), number(known[-1]))
