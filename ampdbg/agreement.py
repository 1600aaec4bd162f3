"""When two replays of a step agree: finite, near each other, nothing lost beyond the noise floor (no torch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ampdbg.record.replays import Investigation, Replay

AGREEMENT = 0.05
"""A loss that differs from FP32's by less than this share agrees with it."""

GRADIENT_AGREEMENT = 0.25
"""Gradients whose distance from FP32's is a smaller share of their norm agree with them."""

NOISE_FLOORS = 4.0
"""What rounding weights and inputs to half changes, so many times over, is still noise."""

LOST_ENERGY = 0.1
"""A larger share of the gradient's sum of squares flushed to zero is a loss that counts."""

DIVERGED = 10.0
"""Losses that climb so many times further than they have ranged before diverge; noise and hard batches do not."""

FEW_LOSSES = 5
"""Fewer losses say little of how far they range: then their size counts as well."""

RESOLUTION = 1e-6
"""A smaller share of a loss is rounding."""

SAME_RUN = 1e-2
"""A replay whose loss is further from the step's own than this share did not run the same computation."""


def is_finite(replay: Replay) -> bool:
    """Whether the replay ran, and its loss and every gradient are finite."""
    return not replay.error and math.isfinite(replay.loss) and not replay.gradients


def agrees(low: Replay, fp32: Replay, floor: Replay | None) -> bool:
    """Whether loss and gradients are as near to FP32's as can be asked for.

    ``floor`` is FP32 on weights and inputs rounded to half; None where it was not needed or did not run.
    """
    return losses_agree(low, fp32, floor) and _gradients_agree(low, floor)


def losses_agree(low: Replay, fp32: Replay, floor: Replay | None) -> bool:
    """Whether the loss is within the noise of FP32's."""
    noise = abs(floor.loss - fp32.loss) if floor else 0.0
    return abs(low.loss - fp32.loss) <= max(AGREEMENT * abs(fp32.loss), NOISE_FLOORS * noise)


def keeps_its_gradients(low: Replay) -> bool:
    """Whether no share of the gradient that counts was flushed to zero."""
    return not low.lost and (low.lost_energy is None or low.lost_energy <= LOST_ENERGY)


def is_same_run(made: Investigation) -> bool:
    """Whether the replay as it was came to the loss that the step itself had."""
    return math.isclose(made.loss, made.replays[0].loss, rel_tol=SAME_RUN, abs_tol=1e-6)


def noise_floor(made: Investigation) -> Replay | None:
    """The replay that shows the noise floor, where it was made and ran."""
    return next((replay for replay in made.replays if replay.rounded and is_finite(replay)), None)


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
        return climb >= 0 and rose([*earlier, *finite])
    ranged = max(earlier) - min(earlier)
    if len(earlier) < FEW_LOSSES:
        ranged = max(ranged, *map(abs, earlier))
    times = 1.0 if rose(earlier, times=1.0) else DIVERGED
    climbs = rose(finite, times=1.0) or rose([min(earlier), *finite])
    return climbs and climb > times * ranged


def _gradients_agree(low: Replay, floor: Replay | None) -> bool:
    noise = (floor.gradient_distance or 0.0) if floor else 0.0
    return (low.gradient_distance or 0.0) <= max(GRADIENT_AGREEMENT, NOISE_FLOORS * noise)
