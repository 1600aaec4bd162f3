"""Runs that diverge by themselves, in FP32 too: when losses rise, and the finding that says so (no torch)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence
from itertools import accumulate

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.producers import finding_at
from ampdbg.quantities import number
from ampdbg.record.findings import Finding
from ampdbg.record.run import Investigation, Record, Step

DIVERGENCE = "divergence"

DIVERGED = 10.0
"""Losses that climb so many times further than they have ranged before diverge; noise and hard batches do not."""

FEW_LOSSES = 5
"""Fewer losses say little of how far they range: then their size counts as well."""

LEAPT = 1000.0
"""Losses so many times the first one have left it for good, though one loss says nothing of how far they range."""

KEPT_SIZE = 1.05
"""Weights that have grown by less are where they began: so few steps have not thrown them away."""

RISEN = 100.0
"""Losses so many times all before them are told of in a run that is healthy otherwise."""

RISEN_NOTE = (
    "the loss rose from {} to {} and stays up, with nothing beyond a limit: look at the learning rate, and compare "
    "with a run in FP32"
)

RESOLUTION = 1e-6
"""A smaller share of a loss is rounding."""


def first_divergence(made: Investigation, record: Record) -> Investigation | None:
    """The first step whose replays show that the run diverges, if ``made`` shows it or was not replayed; else None."""
    own = None if made.is_as_it_trained or not _diverges(made, record) else made
    if own is None and not made.is_as_it_trained:
        return None
    earlier = (other for other in record.investigations if other.step < made.step and _was_replayed(other))
    return min((other for other in earlier if _diverges(other, record)), key=lambda other: other.step, default=own)


def divergence(made: Investigation, record: Record) -> Finding:
    """The finding of a run that diverges."""
    before, climb = _before(made, record), made.continuation
    if climb and all(step.skipped for step in before):  # all with the same weights: other losses are other batches'
        message = f"the loss is {number(climb[0])}, and steps in FP32 on the same batch lead to {number(climb[-1])}"
    else:
        losses = [step.loss for step in before if math.isfinite(step.loss)]
        reached = max(loss for loss in (losses[-1], made.replays[1].loss) if math.isfinite(loss))
        rose_from = f"the loss rose from {number(min(losses))} to {number(reached)}"
        message = f"{rose_from}, and further steps in FP32 go on rising"
    return finding_at(DIVERGENCE, made, message, continuation=list(climb))


def rose(losses: Sequence[float], times: float = DIVERGED) -> bool:
    """Whether from some step on all losses stand above all before it, by more than ``times`` what those range over.

    A constant added to all of them changes nothing and neither does a positive factor: losses may be negative.
    Equal losses do not rise, nor do easy and hard batches that take turns. Two losses are too few to tell.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    highest, lowest = list(accumulate(finite, max)), list(accumulate(finite, min))
    lowest_after = list(accumulate(reversed(finite), min))[::-1]
    return any(
        lowest_after[start] - highest[start - 1]
        > max(times * (highest[start - 1] - lowest[start - 1]), RESOLUTION * abs(highest[start - 1]))
        for start in range(2, len(finite))
    )


def may_have_risen(before: Sequence[float], now: float) -> bool:
    """Whether the last loss, or the one of ``now``, is above where the run began: else nothing can have diverged."""
    finite = [loss for loss in before if math.isfinite(loss)]
    return bool(finite) and any(math.isfinite(loss) and loss > finite[0] for loss in (finite[-1], now))


def climbs_on(before: Sequence[float], continuation: Sequence[float]) -> bool:
    """Whether steps in FP32 on one batch, after the losses ``before`` them, climb by themselves and diverge.

    They have to climb steadily, or at once to quite another level, and further than the losses have ever ranged; much
    further, where those had not risen yet. A continuation that ends in inf or NaN diverges if it does not fall and
    stands clear of them.
    """
    earlier = [loss for loss in before if math.isfinite(loss)]
    finite = [loss for loss in continuation if math.isfinite(loss)]
    if not earlier or not finite:
        return False
    climb = finite[-1] - finite[0]
    if len(finite) < len(continuation):
        return climb >= 0 and (rose([*earlier, *finite]) or _leapt([*earlier, *finite]))
    ranged = max(earlier) - min(earlier)
    if len(earlier) < FEW_LOSSES:
        ranged = max(ranged, *map(abs, earlier))
    times = 1.0 if rose(earlier, times=1.0) else DIVERGED
    climbs = rose(finite, times=1.0) or rose([min(earlier), *finite])
    return climbs and climb > times * ranged


def _leapt(losses: Sequence[float]) -> bool:
    first, *later = losses
    return bool(later and first) and min(later) > LEAPT * abs(first)


def risen(losses: Sequence[float]) -> str:
    """A note of a run without a fault whose losses stand, from some step on, far above the size of all before them;
    "" of others. Some losses are meant to grow, so that it is no more."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    highest = list(accumulate(map(abs, finite), max))
    lowest_after = list(accumulate(reversed(finite), min))[::-1]
    starts = range(2, len(finite) - 1)
    start = next((start for start in starts if lowest_after[start] > RISEN * highest[start - 1]), None)
    return "" if start is None else RISEN_NOTE.format(number(finite[start - 1]), number(finite[-1]))


def _before(made: Investigation, record: Record) -> list[Step]:
    """The steps before it whose losses are of its kind: where an optimizer has a scaler of its own, others are not."""
    own = next((step.scaler for step in record.steps if step.step == made.step), None)
    return [step for step in record.steps if step.step < made.step and own in (None, step.scaler)]


def _diverges(made: Investigation, record: Record) -> bool:
    """Whether FP32 climbs by itself from this step on; where it is not even finite here, whether the loss had risen."""
    before = [step.loss for step in _before(made, record)]
    return climbs_on(before, made.continuation) or (not is_finite(made.replays[1]) and rose(before))


def may_diverge(made: Investigation, record: Record) -> bool:
    """Whether what overflows in a step that no replay judges may come of the learning rate: the losses before it had
    risen, or are too few to tell though weights were written since the first and may have lost their size."""
    earlier = _before(made, record)
    before = [step.loss for step in earlier if math.isfinite(step.loss)]
    if all(step.skipped for step in earlier) or not before:
        return False
    has_kept_size = made.weights_grew != 1.0 and made.weights_grew < KEPT_SIZE  # it is 1 where nobody knows
    are_few = len(before) < FEW_LOSSES and not has_kept_size
    return are_few or before[-1] > max(before[:FEW_LOSSES]) or rose(before) or _leapt(before)


def had_diverged(made: Investigation, record: Record) -> bool:
    """Whether the losses before a step had risen, or the weights had left their size."""
    before = [step.loss for step in _before(made, record) if math.isfinite(step.loss)]
    return made.weights_grew >= KEPT_SIZE or rose(before) or _leapt(before)


def leap_in_fp32(made: Investigation, record: Record) -> str:
    """That in FP32 too the loss has left all earlier ones for good, to be said behind what has made it; "" if not."""
    skipped = {step.step for step in record.steps if step.skipped}
    first = first_in_a_row(made.step, skipped)
    of_same_weights = {first, *itertools.takewhile(lambda step: step - 1 in skipped, itertools.count(first + 1))}
    before = [abs(step.loss) for step in _before(made, record) if step.step < first and math.isfinite(step.loss)]
    # Of a step whose modules alone were run again no losses are known; those of another on the same weights may be.
    told = next((one for one in record.investigations if one.continuation and one.step in of_same_weights), None)
    if not before or told is None:
        return ""
    now = told.replays[1].loss
    comes_back = now <= LEAPT * max(before) or any(loss <= DIVERGED * max(before) for loss in told.continuation)
    return "" if comes_back else f", and in FP32 too the loss leaps from {number(before[-1])} to {number(now)}"


def first_in_a_row(last: int, numbers: Container[int]) -> int:
    """The first of the numbers without a gap that end right before ``last``, or ``last`` itself."""
    while last - 1 in numbers:
        last -= 1
    return last


def _was_replayed(made: Investigation) -> bool:
    return made.reproduced > 0 and len(made.replays) > 1 and not made.replays[1].error
