"""What a replayed step says of the loss scale: which scales would do for it, and whether the run has borne that out."""

from __future__ import annotations

import math

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.cause import cause_of
from ampdbg.diagnosis.producers import NEAR, culprit, survivor
from ampdbg.levels import has_static_scale
from ampdbg.record.codes import CODES
from ampdbg.record.replays import Investigation
from ampdbg.record.run import Record

SOON = 8.0
"""A loss scale that many times lower is found by three skips; a single image may ask for that, and no other again."""

ROOM = 4.0
"""Other batches may need a scale that is so many times lower than the one at which a step has been run again."""


def is_calibration(made: Investigation, record: Record) -> bool:
    """Whether FP32 is finite and so is FP16 at a lower scale, which a dynamic scale will find.

    Where no replay tells, as of a step that was traced as it trained, it may; what the run does then shows.
    """
    if made.is_as_it_trained:
        return True
    if has_static_scale(record.config) or _usable_scale(made) is None:
        return False
    suspect, code = culprit(made), CODES[cause_of(made, record).code]
    is_of_scale = suspect is not None and suspect.needs_only_a_scale and code.verdict != "other"
    return is_finite(made.replays[1]) and (is_of_scale or code.keeps_scale)


def _usable_scale(made: Investigation) -> float | None:
    """The highest of the lower scales at which everything is finite; None where gradients are lost there."""
    survived = survivor(made)
    return survived.scale if survived and not survived.lost else None


def is_first_descent(investigated: list[Investigation], record: Record) -> bool:
    """Whether no scale has worked yet, and the replays show that one will."""
    will_work = bool(investigated) and all(_will_work(made, record) for made in investigated)
    is_refuted = all(_is_cured_before(made, record) for made in investigated)
    return will_work and not is_refuted and not _has_worked(record)


def _has_worked(record: Record) -> bool:
    return any(not step.skipped and step.grad_norm != 0.0 for step in record.steps)


def _will_work(made: Investigation, record: Record) -> bool:
    return not made.is_as_it_trained and is_calibration(made, record)


def _is_cured_before(made: Investigation, record: Record) -> bool:
    """Whether the run has skipped far below the scale that cures the step: something else is behind those skips, as
    where another optimizer has the same scaler. Where a scale has worked, gradients may have grown since."""
    usable = _usable_scale(made)
    lowest = min((step.scale for step in record.steps if step.skipped and math.isfinite(step.loss)), default=math.inf)
    return usable is not None and ROOM * lowest < usable and not _has_worked(record)


def lasts(made: Investigation, record: Record) -> bool:
    """Whether what overflowed would at the run's last scale too, or replays have told.

    Of a step that was seen as it trained only the op that began it is known: where it would not, another op is behind
    the later skips. So it is where replays of the step are finite at scales far above those.
    """
    if _will_work(made, record) and _is_cured_before(made, record):
        return False
    suspect = culprit(made)
    if not made.is_as_it_trained or suspect is None or suspect.producer.phase == "forward" or suspect.value is None:
        return True
    if all(step.skipped for step in record.steps):  # no scale has worked, and the finding says so
        return True
    at_last = suspect.value / suspect.low.scale * record.steps[-1].scale
    return at_last >= NEAR * suspect.format.overflow_threshold


def works_soon_below(made: Investigation, record: Record) -> bool:
    """Whether a loss scale that is soon found below the step's own would have done."""
    usable = _usable_scale(made)
    return usable is not None and usable >= made.replays[0].scale / SOON and is_calibration(made, record)
