"""When two replays of a step agree: finite, near each other, nothing lost beyond the noise floor (no torch)."""

from __future__ import annotations

import math
from typing import TypeGuard

from ampdbg.formats import FLOAT16, FORMATS
from ampdbg.record.run import Investigation, Replay

AGREEMENT = 0.05
"""A loss that differs from FP32's by less than this share agrees with it."""

GRADIENT_AGREEMENT = 0.25
"""Gradients whose distance from FP32's is a smaller share of their norm agree with them."""

NOISE_FLOORS = 4.0
"""What rounding weights to half changes, so many times over, is still noise."""

NOTHING_IN_COMMON = 1.0
"""Gradients whose distance from FP32's is FP32's own norm: zeros are as near. Where rounded weights lead FP32 itself so
far, as behind a BatchNorm of two nearly equal values, its gradients are noise, and no distance from them says more."""

GRADIENT_DOUBT = 0.1
"""Gradients further from FP32's than this share of their norm, and far beyond the noise floor, are worth a warning."""

BEYOND_NOISE = 16.0
"""What is so many times the noise floor from FP32 is no rounding of weights that the layers have added up:
of 56 sound steps, of small models and of public code, none is more than 3 times."""

FP32_ROUNDING = 1e-6
"""Losses of two runs that are no further apart, relatively, differ by FP32's own rounding."""

LOST_ENERGY = 0.1
"""A larger share of the gradient's sum of squares flushed to zero is a loss that counts."""

SAME_RUN = 1e-2
"""A replay whose loss is further from the step's own than this share did not run the same computation."""

TAKEN = 10
"""Behind so many steps in a row that an optimizer has taken, the next is compared with FP32: what it hides, such as an
overflow that erases itself, shows in no loss."""


def is_finite(replay: Replay | None) -> TypeGuard[Replay]:
    """There is such a replay, it ran, and its loss and every gradient are finite."""
    return replay is not None and not replay.error and math.isfinite(replay.loss) and not replay.gradients


def agrees(low: Replay, fp32: Replay, floor: Replay | None) -> bool:
    """Loss and gradients are as near to FP32's as can be expected.

    ``floor`` is FP32 on weights rounded to half; None where it was not needed or did not run.
    """
    noise = (floor.gradient_distance or 0.0) if floor else 0.0
    limit = max(GRADIENT_AGREEMENT, NOISE_FLOORS * noise) if noise < NOTHING_IN_COMMON else math.inf
    return (low.gradient_distance or 0.0) <= limit and losses_agree(low, fp32, floor)


def losses_agree(low: Replay, fp32: Replay, floor: Replay | None) -> bool:
    """The loss is within the noise of FP32's.

    One that is almost zero is a difference of values near 1, such as 1 - similarity: half rounds each of these once.
    """
    noise = abs(floor.loss - fp32.loss) if floor else 0.0
    rounding = 2.0 ** -FORMATS.get(low.dtype, FLOAT16).precision
    return abs(low.loss - fp32.loss) <= max(AGREEMENT * abs(fp32.loss), NOISE_FLOORS * noise, rounding)


def is_beyond_noise(low: Replay, floor: Replay | None) -> bool:
    """Gradients that agree with FP32's are still further from them than rounding leads; not where the floor is less
    than half rounds by: it shows nothing then."""
    noise, distance = (floor.gradient_distance or 0.0) if floor else 0.0, low.gradient_distance or 0.0
    is_known = noise >= 2.0 ** -(FORMATS.get(low.dtype, FLOAT16).precision + 2)
    return is_known and distance > max(GRADIENT_DOUBT, BEYOND_NOISE * noise)


def keeps_its_gradients(low: Replay) -> bool:
    """No share of the gradient that counts was flushed to zero."""
    return not low.lost and (low.lost_energy is None or low.lost_energy <= LOST_ENERGY)


def is_same_run(made: Investigation) -> bool:
    """The unchanged replay has the loss that the step itself had."""
    return math.isclose(made.loss, made.low.loss, rel_tol=SAME_RUN, abs_tol=1e-6)


def noise_floor(made: Investigation) -> Replay | None:
    """The replay that shows the noise floor, where it was made and ran."""
    return made.floor if is_finite(made.floor) else None


def agrees_with_fp32(made: Investigation) -> bool:
    """Replays show that a step which looks healthy is: it computes the same again, and FP32 too."""
    if made.why != "end" or not (is_finite(made.low) and is_finite(made.fp32) and is_same_run(made)):
        return False
    floor = noise_floor(made)
    is_near = agrees(made.low, made.fp32, floor) and not is_beyond_noise(made.low, floor)
    return keeps_its_gradients(made.low) and is_near
