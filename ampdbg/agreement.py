"""Decide whether two replays of a step agree (no torch).

The noise floor is the change that rounding the weights to half precision makes in an FP32 replay.
"""

from __future__ import annotations

import math
from typing import TypeGuard

from ampdbg.formats import FLOAT16, FORMATS
from ampdbg.record.run import Investigation, Replay

AGREEMENT = 0.05
"""Losses agree if they differ by less than this share of the FP32 loss."""

GRADIENT_AGREEMENT = 0.25
"""Gradients agree if their distance from FP32's is a smaller share of the norm of FP32's."""

NOISE_FLOORS = 4.0
"""A difference of at most this many noise floors is still noise."""

NOISE_LIMIT = 1.0
"""Gradients this far from FP32's, in norms of FP32's, are no nearer than zeros. Rounded weights may move FP32 itself
this far, as in a BatchNorm of two nearly equal values. FP32's gradients are then noise, and no distance counts."""

GRADIENT_WARNING = 0.1
"""Gradients further from FP32's than this share of their norm, and far beyond the noise floor, are worth a warning."""

BEYOND_NOISE = 16.0
"""A distance of more noise floors than this cannot come from rounded weights, even if layers add it up. Measured: 56
healthy steps, of small models and of public code. None is more than 3 noise floors from FP32."""

FP32_ROUNDING = 1e-6
"""Two losses with at most this relative difference differ only by FP32's own rounding."""

LOST_ENERGY = 0.1
"""A gradient has lost too much if more than this share of its sum of squares was flushed to zero."""

SAME_RUN = 1e-2
"""A replay ran another computation if its loss differs from the step's own by more than this share."""

STEPS_BEFORE_COMPARISON = 10
"""After an optimizer has taken this many consecutive steps, ampdbg compares the next step with FP32. That step may hide
a fault that no loss shows, such as an overflow that a later op erases."""


def is_finite(replay: Replay | None) -> TypeGuard[Replay]:
    """True if the replay was made and ran, and its loss and every gradient are finite."""
    return replay is not None and not replay.error and math.isfinite(replay.loss) and not replay.gradients


def agrees(low: Replay, fp32: Replay, floor: Replay | None) -> bool:
    """True if the loss and the gradients are as close to FP32's as rounding allows.

    ``floor`` is the FP32 replay on weights rounded to half; None if it was not needed or did not run.
    """
    noise = gradient_noise(floor)
    limit = max(GRADIENT_AGREEMENT, NOISE_FLOORS * noise) if noise < NOISE_LIMIT else math.inf
    return (low.gradient_distance or 0.0) <= limit and losses_agree(low, fp32, floor)


def gradient_noise(floor: Replay | None) -> float:
    """Return how far rounding the weights alone moves the gradients, as a share of their norm; 0 if not known."""
    return (floor and floor.gradient_distance) or 0.0


def losses_agree(low: Replay, fp32: Replay, floor: Replay | None) -> bool:
    """True if the loss is within the noise of FP32's.

    A loss near zero may be a difference of values near 1, such as 1 - similarity. Half rounds each of them once.
    """
    noise = abs(floor.loss - fp32.loss) if floor else 0.0
    rounding = 2.0 ** -FORMATS.get(low.dtype, FLOAT16).precision
    return abs(low.loss - fp32.loss) <= max(AGREEMENT * abs(fp32.loss), NOISE_FLOORS * noise, rounding)


def is_beyond_noise(low: Replay, floor: Replay | None) -> bool:
    """True if gradients that agree with FP32's are still further from them than rounding explains. False if the noise
    floor is smaller than half's own rounding: it shows nothing then."""
    noise, distance = gradient_noise(floor), low.gradient_distance or 0.0
    is_known = noise >= 2.0 ** -(FORMATS.get(low.dtype, FLOAT16).precision + 2)
    return is_known and distance > max(GRADIENT_WARNING, BEYOND_NOISE * noise)


def keeps_its_gradients(low: Replay) -> bool:
    """True if no significant share of the gradient was flushed to zero."""
    return not low.lost and (low.lost_energy is None or low.lost_energy <= LOST_ENERGY)


def is_same_run(made: Investigation) -> bool:
    """True if the unchanged replay has the loss that the step itself had."""
    return math.isclose(made.loss, made.low.loss, rel_tol=SAME_RUN, abs_tol=1e-6)


def noise_floor(made: Investigation) -> Replay | None:
    """Return the replay that shows the noise floor; None if it was not made or did not run."""
    return made.floor if is_finite(made.floor) else None


def is_comparable(made: Investigation) -> bool:
    """True if a step that looks healthy computes the same again, and is finite in FP32 too."""
    return made.why == "end" and is_finite(made.low) and is_same_run(made) and is_finite(made.fp32)


def agrees_with_fp32(made: Investigation) -> bool:
    """True if the replays confirm a step that looks healthy: it is comparable with FP32, and agrees with it."""
    low, floor = made.low, noise_floor(made)
    is_near = agrees(low, made.reference, floor) and not is_beyond_noise(low, floor)
    return is_comparable(made) and keeps_its_gradients(low) and is_near
