"""When losses rise, and when a run diverges by itself: pure functions of a series of losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from ampdbg.quantities import number
from ampdbg.record.run import Step

DIVERGED = 10.0
"""Losses that climb so many times further than they have ranged before diverge; noise and hard batches do not."""

FEW_LOSSES = 5
"""Fewer losses say little of how far they range: then their size counts as well."""

LEAPT = 1000.0
"""Losses so many times the first one have left it for good, though one loss says nothing of how far they range."""

NOISE = 3.0
"""The losses of a run that keeps rising reach so many times as high as one falls to the next."""

RISEN = 10.0
"""A run that is healthy otherwise gets a note where its losses stay so many times above all before them."""

RISEN_NOTE = (
    "the loss rose from {} to {} and stays there, with nothing beyond a limit: check the learning rate, and "
    "compare with a run in FP32"
)

RESOLUTION = 1e-6
"""A smaller share of a loss is rounding."""


def losses_of(steps: Iterable[Step]) -> list[float]:
    """What to compare with, each as if it were of as many passes as the last: no loss that is exactly 0, as that of a
    discriminator before it begins to train."""
    known = [step for step in steps if step.loss]
    return finite([step.loss / step.passes * known[-1].passes for step in known])


def finite(losses: Sequence[float]) -> list[float]:
    """The losses that are finite."""
    return [loss for loss in losses if math.isfinite(loss)]


def _lowest_after(losses: Sequence[float]) -> list[float]:
    """For each loss the lowest from it on."""
    return list(accumulate(reversed(losses), min))[::-1]


def _largest_fall_after(losses: Sequence[float]) -> list[float]:
    """For each loss how far, at most, a later one falls to the next."""
    falls = [max(0.0, one - other) for one, other in pairwise(losses)]
    return [*list(accumulate(reversed(falls), max))[::-1], 0.0]


def rose(losses: Sequence[float], times: float = DIVERGED, *, are_of_batches: bool = False) -> bool:
    """From some step on all losses stand above all before it, by more than ``times`` what those range over.

    A constant added to all of them changes nothing and neither does a positive factor: losses may be negative.
    Equal losses do not rise, nor do easy and hard batches that take turns. Two losses are too few to tell. How far few
    of them range says little where they ``are_of_batches``, each of another: then later ones have to reach several
    times as high above them as any of those falls to the next.
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
    """All losses behind the first are many times as large."""
    first, *later = losses or [0.0]
    return bool(later and first) and min(later) > LEAPT * abs(first)


def may_have_risen(before: Sequence[float], now: float) -> bool:
    """The last loss, or the one of ``now``, is above where the run began: else nothing can have diverged."""
    known = finite(before)
    return bool(known) and any(loss > known[0] for loss in finite((known[-1], now)))


def climbs_on(before: Sequence[float], continuation: Sequence[float]) -> bool:
    """Steps in FP32 on one batch, after the losses ``before`` them, climb by themselves and diverge.

    They have to climb steadily, or at once to quite another level, and further than the losses have ever ranged; much
    further, where those had not risen yet. A continuation that ends in inf or NaN diverges if it does not fall and
    stands clear of them.
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
    """A note of a run without a fault whose losses stand, from some step on, far above the size of all before them;
    "" of others. Some losses are meant to grow, so that it is no more."""
    known = finite(losses)
    highest, after = list(accumulate(map(abs, known), max)), _lowest_after(known)
    starts = range(1 if leapt(known) else 2, len(known) - 1)
    start = next((start for start in starts if after[start] > RISEN * highest[start - 1]), None)
    return "" if start is None else RISEN_NOTE.format(number(known[start - 1]), number(known[-1]))
