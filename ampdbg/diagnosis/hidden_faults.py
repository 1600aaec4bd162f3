"""The faults that a step hides whose loss and gradients are finite: overflow that erases itself, lost gradients, lost
precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ampdbg.agreement import (
    AGREEMENT,
    LOST_ENERGY,
    agrees,
    is_finite,
    is_same_run,
    losses_agree,
    noise_floor,
)
from ampdbg.diagnosis.producers import (
    FAR_FROM_FP32,
    Suspect,
    erased_in,
    finding_at,
    format_of,
    named,
    overflow,
    overflow_in,
)
from ampdbg.diagnosis.scale import GROWTH
from ampdbg.levels import has_static_scale
from ampdbg.ops import CHOOSES, base_name
from ampdbg.quantities import number
from ampdbg.record.findings import Finding
from ampdbg.record.run import Investigation, Record, Replay

STARTS_LOW = (
    "make the loss larger, or start the scaler at a larger scale, as GradScaler(init_scale=2.0**24): by itself it "
    "doubles its scale only every growth_interval steps"
)
HELD_DOWN = (
    "scale the losses apart, a backward pass and a GradScaler for each: at a larger scale other gradients overflow"
)


def hidden_faults(record: Record) -> Iterator[Finding]:
    """What the last step of a run that looks healthy hides."""
    for made in record.investigations:
        # Code that does not compute the same again cannot be compared with FP32.
        if made.why == "end" and is_finite(made.fp32) and is_finite(made.low) and is_same_run(made):
            yield from _faults(made, made.fp32, record)


def _faults(made: Investigation, fp32: Replay, record: Record) -> Iterator[Finding]:
    low, floor = made.low, noise_floor(made)
    # Without its noise floor a difference says nothing.
    is_far = floor is not None and not agrees(low, fp32, floor)
    hidden, erased = overflow_in(made), erased_in(made)
    if hidden is not None:
        yield _silent_overflow(hidden, fp32, is_far)
    elif erased is not None:
        yield _erased_overflow(erased, fp32)
    if (low.lost_energy or 0.0) > LOST_ENERGY or (is_far and hidden is None and low.lost):
        yield _underflow(made, record)
    elif is_far and hidden is None and not _chooses_otherwise(made, fp32):
        yield _precision_loss(made, fp32)


def _silent_overflow(suspect: Suspect, fp32: Replay, is_far: bool) -> Finding:
    low = suspect.made.low
    if not is_far and suspect.producer.phase == "backward" and _agree(low):
        return _erased_overflow(suspect, fp32)
    result = _losses(low, fp32) if is_far else "the loss still agrees with FP32's"
    message = f"{overflow(suspect)}, and a later op turns the inf into a finite value; {result}"
    evidence = {"value": suspect.value, **_against_fp32(low, fp32)}
    found = finding_at("silent-overflow", suspect.made, message, suspect.producer, **evidence)
    return found if is_far else replace(found, severity="warning")


def _agree(low: Replay) -> bool:
    return low.gradient_distance is not None and low.gradient_distance <= AGREEMENT


def _erased_overflow(suspect: Suspect, fp32: Replay) -> Finding:
    """A gradient overflowed where FP32 makes a zero of it too, as behind a ReLU."""
    message = f"{overflow(suspect)}, and a later op turns the inf into a zero, as it does in FP32"
    evidence = {"value": suspect.value, **_against_fp32(suspect.made.low, fp32)}
    found = finding_at("silent-overflow", suspect.made, message, suspect.producer, **evidence)
    return replace(found, severity="info", remedy="")


def _underflow(made: Investigation, record: Record) -> Finding:
    low = made.low
    flushes = f"{format_of(low.dtype).short} flushes {low.lost_energy or 0.0:.0%} of the gradient's energy to zero"
    message = f"at a loss scale of {number(low.scale)}, {flushes}"
    lost = low.lost[:20]
    found = finding_at(
        "gradient-underflow", made, message, loss_scale=low.scale, lost_energy=low.lost_energy, lost=lost
    )
    if has_static_scale(record.config) or not any(step.scaler for step in record.steps):
        return found
    # The scaler is a dynamic one: what keeps its scale down is another gradient, or that it began there.
    skipped = (step for step in record.steps if step.skipped and step.scaler and math.isfinite(step.loss))
    is_held = any(low.scale < step.scale <= GROWTH * low.scale for step in skipped)
    return replace(found, remedy=HELD_DOWN if is_held else STARTS_LOW)


def _chooses_otherwise(made: Investigation, fp32: Replay) -> bool:
    """Whether a choice alone is far from FP32's, such as which box an object is matched to, and the loss agrees."""
    first, floor = made.first_far, noise_floor(made)
    return first is not None and base_name(first.op) in CHOOSES and losses_agree(made.low, fp32, floor)


def _precision_loss(made: Investigation, fp32: Replay) -> Finding:
    low = made.low
    where = f"; {named(made.first_far)} is the first op that differs" if made.first_far else ""
    message = f"the step differs from FP32 by more than rounding explains: {_losses(low, fp32)}{where}"
    return finding_at(FAR_FROM_FP32, made, message, made.first_far, **_against_fp32(low, fp32))


def _losses(low: Replay, fp32: Replay) -> str:
    return f"the loss is {number(low.loss)}, and {number(fp32.loss)} in FP32"


def _against_fp32(low: Replay, fp32: Replay) -> dict[str, object]:
    return {"loss": low.loss, "loss_in_fp32": fp32.loss, "gradient_distance": low.gradient_distance}
