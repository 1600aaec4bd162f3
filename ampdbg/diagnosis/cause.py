"""The cause of an unhealthy step, decided by its replays: precision, mathematics, data, or not known.

The order is that of DIAGNOSES: does the replay reproduce it at all, is FP32 finite, does FP32 diverge, and
only then which FP16 op is the producer and which code its numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdbg.findings import Finding
from ampdbg.formats import FLOAT16
from ampdbg.record import Investigation, Producer, Record, Replay, Step

LIMIT = FLOAT16.overflow_threshold

DIVERGED = 10.0
"""A loss that grows this much over FP32 steps on one batch, or before the step, diverges by itself."""

DIVISIONS = ("aten.div", "aten.reciprocal", "aten.rsqrt", "aten.log", "aten.pow", "aten.sqrt")
"""Ops that turn a constant which FP16 flushed to zero into inf or NaN."""

REMEDIES = {
    "forward-overflow": "run this op in FP32 with its inputs cast up, or scale before the product",
    "gradient-overflow": "run this op in FP32 with its inputs cast up; take a mean instead of a sum",
    "eps-underflow": "use an eps of at least 1e-6, or compute this statistic in FP32",
    "data-range": "normalise the data: it is beyond what FP16 can hold",
    "true-nan": "change the formula: clamp inside the square root, use a safe where; no precision helps",
    "infinite-loss": "filter these samples, or let the loss zero them (zero_infinity)",
    "divergence": "lower the learning rate, warm up, or clip gradients; no precision helps",
    "silent-overflow": "compute this statistic in FP32",
    "gradient-underflow": "use a larger loss scale",
    "unknown": "compare with a run in FP32: --set precision.level=O0",
}


def cause_of(made: Investigation, record: Record) -> Finding:
    """The root finding of an investigated step whose loss or gradients are not finite."""
    low, fp32 = made.replays[0], made.replays[1]
    if _is_finite(low):
        return _finding("unknown", made, None, "the replay of this step is finite: it does not come back every time")
    if fp32.error:
        return _finding("unknown", made, None, f"the same step in FP32 could not be run: {fp32.error}")
    if _diverges(made, record):
        return _divergence(made, record)
    if not _is_finite(fp32):
        return _wrong_in_fp32_too(made)
    producer = _first_producer(low, made.why)
    if producer is None:
        return _finding("unknown", made, None, "FP32 is finite, and no op was seen where FP16 goes wrong")
    return _precision(made, producer)


def silent_faults(made: Investigation) -> list[Finding]:
    """What a step that looks healthy hides: an overflow that erased itself, gradients flushed to zero."""
    low, fp32 = made.replays[0], made.replays[1]
    found = []
    # Gradients that overflow hide nothing: the scaler skips the last step as it would any other.
    if not _is_finite(low) or not _is_finite(fp32):
        return []
    producer = _first_producer(low, "loss") or _first_producer(low, "gradients")
    if producer is not None and not _agree(low, fp32):
        message = f"{_named(producer)} overflows and erases itself: the loss is {low.loss:.4g}, in FP32 {fp32.loss:.4g}"
        found.append(_finding("silent-overflow", made, producer, message))
    if low.lost_energy is not None and low.lost_energy > LOST_ENERGY:
        message = f"at a loss scale of {low.scale:g} {low.lost_energy:.0%} of the gradient's energy is flushed to zero"
        found.append(_finding("gradient-underflow", made, None, message))
    return found


AGREEMENT = 0.05
"""A loss, or a gradient norm, that differs from FP32's by less than this share agrees with it."""

LOST_ENERGY = 0.1
"""A larger share of the gradient's sum of squares lost to zero is a finding."""


def _precision(made: Investigation, producer: Producer) -> Finding:
    low = made.replays[0]
    code = _code_of(made, producer)
    value = _value_in_fp32(producer, low)
    reached = f"reaches {value:.4g} in FP32" if value is not None else "is finite in FP32"
    message = f"{_named(producer)} {reached}, FP16 ends at {FLOAT16.largest:g}"
    if code == "eps-underflow":
        message = f"{_named(producer)} divides by what FP16 has flushed to zero; nothing here is large"
    if code == "data-range":
        message = f"the batch holds {producer.input_largest:.4g}, and FP16 ends at {FLOAT16.largest:g}"
    if code == "unknown":
        message = f"{_named(producer)} is not finite in FP16, yet {reached}: no overflow explains it"
    survived = [replay.scale for replay in made.replays[2:] if replay.dtype == low.dtype and _is_finite(replay)]
    return _finding(
        code,
        made,
        producer,
        message + (f"; at a loss scale of {survived[0]:g} it is finite" if survived else ""),
        value=value,
        limit=FLOAT16.largest,
        loss_scale=low.scale,
        survives_scale=survived[0] if survived else None,
    )


def _code_of(made: Investigation, producer: Producer) -> str:
    value = _value_in_fp32(producer, made.replays[0])
    if _is_cast(producer) and any(producer.input_largest == largest for largest in made.batch_largest.values()):
        return "data-range"
    if value is not None and value >= LIMIT:
        return "forward-overflow" if producer.phase == "forward" else "gradient-overflow"
    wide = [replay for replay in made.replays if replay.dtype == "bfloat16"]
    if producer.op.startswith(DIVISIONS) and all(map(_is_finite, wide)):
        return "eps-underflow"
    return "unknown"


def _value_in_fp32(producer: Producer, low: Replay) -> float | None:
    """The largest magnitude that the op has in FP32, at the loss scale of the step."""
    if _is_cast(producer):
        return producer.input_largest
    if producer.fp32_largest is None:
        return None
    return producer.fp32_largest * (low.scale if producer.phase == "backward" else 1.0)


def _is_cast(producer: Producer) -> bool:
    return producer.op.startswith("aten._to_copy")


def _first_producer(replay: Replay, why: str) -> Producer | None:
    """The first op that goes wrong in FP16 and not in FP32: intended infinities show in both."""
    phase = "backward" if why == "gradients" else "forward"
    for producer in replay.producers:
        if producer.phase == phase and producer.finite_in_fp32 is not False and not _is_mask(producer):
            return producer
    return None


def _is_mask(producer: Producer) -> bool:
    """A constant such as finfo(float32).min that is cast to half: meant to be minus infinity."""
    return _is_cast(producer) and producer.input_largest > 1e30


def _wrong_in_fp32_too(made: Investigation) -> Finding:
    fp32 = made.replays[1]
    fp64 = next((replay for replay in made.replays if replay.dtype == "float64"), None)
    producer = next((item for item in fp32.producers if made.why == "loss" or item.phase == "backward"), None)
    where = f", first in {_named(producer)}" if producer else ""
    if fp64 is None or fp64.error or _is_finite(fp64):
        return _finding("unknown", made, producer, f"not finite in FP32 either, and FP64 does not confirm it{where}")
    if math.isinf(fp64.loss) and fp64.loss > 0 and not fp64.gradients:
        return _finding("infinite-loss", made, producer, f"the loss is inf in FP32 and in FP64 too{where}")
    return _finding(
        "true-nan", made, producer, f"not finite in FP32 and in FP64 too{where}: mathematics, not precision"
    )


def _diverges(made: Investigation, record: Record) -> bool:
    """Whether FP32 goes wrong by itself from here on, after a loss that was already rising."""
    return _rose(record.steps, made.step) and (not _is_finite(made.replays[1]) or _grows(made.continuation))


def _rose(steps: Sequence[Step], until: int) -> bool:
    losses = [abs(step.loss) for step in steps[:until] if math.isfinite(step.loss)]
    return len(losses) >= 2 and losses[-1] > DIVERGED * min(losses) and losses[-1] > losses[0]


def _grows(losses: Sequence[float]) -> bool:
    return bool(losses) and not (math.isfinite(losses[-1]) and abs(losses[-1]) <= DIVERGED * abs(losses[0]))


def _divergence(made: Investigation, record: Record) -> Finding:
    before = [step.loss for step in record.steps[: made.step] if math.isfinite(step.loss)]
    message = (
        f"the loss rose from {min(before):.4g} to {before[-1]:.4g} before this step, and FP32 diverges from here too"
    )
    return _finding("divergence", made, None, message, continuation=list(made.continuation))


def _agree(low: Replay, fp32: Replay) -> bool:
    pairs = ((low.loss, fp32.loss), (low.grad_norm, fp32.grad_norm))
    return all(math.isclose(one, other, rel_tol=AGREEMENT, abs_tol=1e-6) for one, other in pairs)


def _is_finite(replay: Replay) -> bool:
    return not replay.error and math.isfinite(replay.loss) and not replay.gradients


def _named(producer: Producer) -> str:
    inside = f" in {producer.module}" if producer.module else ""
    return f"{producer.op}{inside}"


def _finding(code: str, made: Investigation, at: Producer | None, message: str, **evidence: object) -> Finding:
    phase = at.phase if at else "backward" if made.why == "gradients" else "forward"
    return Finding(
        code=code,
        severity="error",
        step=made.step,
        phase="data" if code == "data-range" else phase,
        message=message,
        remedy=REMEDIES[code],
        module=at.module if at else "",
        op=at.op if at else "",
        parameter=at.parameter if at else "",
        source=at.source if at else None,
        evidence={key: value for key, value in evidence.items() if value is not None},
    )
