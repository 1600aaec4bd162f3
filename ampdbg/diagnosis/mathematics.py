"""Causes that FP32 shares: true NaN, infinite losses, and runs that diverge by themselves."""

from __future__ import annotations

import math
from dataclasses import replace

from ampdbg.agreement import climbs_on, is_finite, rose
from ampdbg.diagnosis.remedies import finding_at, named
from ampdbg.record.findings import Finding
from ampdbg.record.replays import Investigation, Producer
from ampdbg.record.run import Record

LARGE = 1e15
"""Some such values, multiplied or squared and summed, are beyond FP32."""

TOO_LARGE = "bring these values down: look for weights, divisors or inputs of that size; no pin helps, FP32 fails too"
TOO_COARSE = "change the formula where it divides or cancels; no pin helps, FP32 fails too"


def wrong_in_fp32_too(made: Investigation) -> Finding:
    """The finding of a step that is not finite in FP32: FP64 decides whether its mathematics is."""
    producer = _starts_in(made)
    where = f", first in {named(producer)}" if producer else ""
    fp64 = next((replay for replay in made.replays if replay.dtype == "float64"), None)
    if fp64 is None or fp64.error or is_finite(fp64):
        return _beyond_fp32(made, producer, where, fp64.error if fp64 else "")
    if fp64.loss == math.inf and made.replays[1].loss == math.inf:
        share = f": {producer.inf} of {producer.size} values" if producer else ""
        message = f"the loss is infinite in FP32 and in FP64 too{where}{share}"
        return finding_at("infinite-loss", made, producer, message)
    return finding_at(
        "true-nan", made, producer, f"not finite in FP32 and in FP64 too{where}: mathematics, not precision"
    )


def _beyond_fp32(made: Investigation, producer: Producer | None, where: str, error: str) -> Finding:
    """The finding of a step that FP32 does not come through either, though its mathematics may: not FP16's fault."""
    largest = producer.input_largest if producer and producer.input_largest > LARGE else None
    of = f" on values of up to {largest:.4g}" if largest else ""
    limit = "it is beyond FP32's range, not only FP16's" if largest else "FP32 rounds too coarsely, not only FP16"
    why = f"FP64 could not be run: {error}" if error else f"FP64 is: {limit}"
    found = finding_at(
        "unknown",
        made,
        producer,
        f"not finite in FP32 either{where}{of}, and {why}",
        {"finite_in_fp32": False, "largest": largest},
    )
    return replace(found, remedy=TOO_LARGE if largest else TOO_COARSE)


def first_divergence(made: Investigation, record: Record) -> Investigation | None:
    """The first step whose replays show that the run diverges, where ``made`` shows it; else None."""
    if not _diverges(made, record):
        return None
    earlier = (other for other in record.investigations if other.step < made.step and _was_replayed(other))
    return min((other for other in earlier if _diverges(other, record)), key=lambda other: other.step, default=made)


def divergence(made: Investigation, record: Record) -> Finding:
    """The finding of a run that diverges."""
    losses = [step.loss for step in record.steps[: made.step] if math.isfinite(step.loss)]
    reached = max(loss for loss in (losses[-1], made.replays[1].loss) if math.isfinite(loss))
    message = f"the loss rose from {min(losses):.4g} to {reached:.4g}, and FP32 diverges from this step on too"
    return finding_at("divergence", made, None, message, {"continuation": list(made.continuation)})


def _diverges(made: Investigation, record: Record) -> bool:
    """Whether FP32 climbs by itself from this step on; where it is not even finite here, whether the loss had risen."""
    before = [step.loss for step in record.steps[: made.step]]
    return climbs_on(before, made.continuation) or (not is_finite(made.replays[1]) and rose(before))


def _was_replayed(made: Investigation) -> bool:
    return made.reproduced > 0 and len(made.replays) > 1 and not made.replays[1].error


def _starts_in(made: Investigation) -> Producer | None:
    """Where FP32 goes wrong: an op that makes a NaN of finite numbers is wrong for certain, an inf may be meant."""
    phases = ("forward",) if made.why == "loss" else ("backward",)
    found = [producer for producer in made.replays[1].producers if producer.phase in phases]
    return next((producer for producer in found if producer.nan), next(iter(found), None))
