"""Faults behind a finite loss and finite gradients: overflow that erases itself, lost gradients, lost precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampdbg.agreement import AGREEMENT, LOST_ENERGY, agrees, is_finite, is_same_run, noise_floor
from ampdbg.diagnosis.producers import FAR_FROM_FP32, Suspect, finding_at, named, overflow, suspects
from ampdbg.formats import FLOAT16, FORMATS
from ampdbg.quantities import number
from ampdbg.record.findings import Finding
from ampdbg.record.replays import Investigation, Replay
from ampdbg.record.run import Record


def hidden_faults(record: Record) -> Iterator[Finding]:
    """What the last step of a run that looks healthy hides."""
    for made in record.investigations:
        if made.why == "end" and _can_be_judged(made):
            yield from _faults(made)


def _can_be_judged(made: Investigation) -> bool:
    """Code that does not compute the same again cannot be compared with FP32."""
    return len(made.replays) > 1 and is_finite(made.replays[0]) and is_finite(made.replays[1]) and is_same_run(made)


def _faults(made: Investigation) -> Iterator[Finding]:
    low, fp32, floor = made.replays[0], made.replays[1], noise_floor(made)
    # Without its noise floor a difference says nothing.
    is_far = floor is not None and not agrees(low, fp32, floor)
    overflow = next((suspect for suspect in suspects(made) if suspect.overflows and not suspect.is_constant), None)
    if overflow is not None:
        yield _silent_overflow(overflow, is_far)
    if _lost_energy(low) > LOST_ENERGY:
        yield _underflow(made)
    elif is_far and overflow is None:
        yield _precision_loss(made)


def _silent_overflow(suspect: Suspect, is_far: bool) -> Finding:
    low, fp32 = suspect.made.replays[:2]
    harmless = not is_far and _changes_nothing(suspect)
    result = _losses(low, fp32) if is_far else "the loss still agrees with FP32's"
    message = f"{overflow(suspect)}, and a later op turns the inf into a finite value; {result}"
    if harmless:
        message = f"{overflow(suspect)}, and a later op turns the inf into a zero, as it does in FP32"
    found = finding_at(
        "silent-overflow",
        suspect.made,
        suspect.producer,
        message,
        {"value": suspect.value, **_against_fp32(low, fp32)},
        severity="error" if is_far else "info" if harmless else "warning",
    )
    return replace(found, remedy="") if harmless else found


def _changes_nothing(suspect: Suspect) -> bool:
    """Whether a gradient overflowed where FP32 makes a zero of it too, as behind a ReLU: all gradients still agree."""
    distance = suspect.made.replays[0].gradient_distance
    return suspect.producer.phase == "backward" and distance is not None and distance <= AGREEMENT


def _underflow(made: Investigation) -> Finding:
    low = made.replays[0]
    message = (
        f"at a loss scale of {number(low.scale)}, {_format(low)} flushes {_lost_energy(low):.0%} of the gradient's "
        "energy to zero"
    )
    return finding_at(
        "gradient-underflow",
        made,
        None,
        message,
        {"loss_scale": low.scale, "lost_energy": low.lost_energy, "lost": low.lost[:20]},
    )


def _precision_loss(made: Investigation) -> Finding:
    low, fp32 = made.replays[:2]
    where = f"; {named(made.first_far)} is the first op that differs" if made.first_far else ""
    message = f"the step differs from FP32 by more than rounding explains: {_losses(low, fp32)}{where}"
    return finding_at(FAR_FROM_FP32, made, made.first_far, message, _against_fp32(low, fp32))


def _losses(low: Replay, fp32: Replay) -> str:
    return f"the loss is {number(low.loss)}, and {number(fp32.loss)} in FP32"


def _format(low: Replay) -> str:
    return FORMATS.get(low.dtype, FLOAT16).short


def _lost_energy(low: Replay) -> float:
    return low.lost_energy or 0.0


def _against_fp32(low: Replay, fp32: Replay) -> dict[str, object]:
    return {"loss": low.loss, "loss_in_fp32": fp32.loss, "gradient_distance": low.gradient_distance}
