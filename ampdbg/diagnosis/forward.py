"""Findings about the forward pass: a loss that is not finite, an error that autocast causes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdbg.diagnosis.cause import cause_of
from ampdbg.diagnosis.half_weights import spoilt_weights
from ampdbg.diagnosis.tensors import blamed_in_batch, weights_nonfinite
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Step

AUTOCAST_REMEDIES = {
    "mask-constant": "use torch.finfo(x.dtype).min with masked_fill, or a boolean mask",
    "misuse-bce": "return logits and use torch.nn.BCEWithLogitsLoss, which is safe under autocast",
    "misuse-half-parameters": "keep the parameters in float32 and let autocast lower the ops",
}


def autocast_errors(record: Record) -> Iterator[Finding]:
    """An exception that autocast causes: a finding, because the same code runs in FP32."""
    error = record.autocast_error
    if error is not None:
        yield Finding(
            code=error.code,
            severity="error",
            step=error.step,
            phase="optimizer" if error.code == "misuse-half-parameters" else "forward",
            message=error.message.partition("\n")[0],
            remedy=AUTOCAST_REMEDIES[error.code],
            source=error.source,
        )


def nonfinite_loss(record: Record) -> Iterator[Finding]:
    """A loss of inf or NaN. The loss scale plays no part in it, so no calibration explains it.

    Replays decide the cause; without them the code is ``unknown``. Steps that bad weights or a bad batch
    explain are left to those.
    """
    bad = [step for step in record.steps if not math.isfinite(step.loss) and not _is_explained(step, record)]
    if not bad:
        return
    numbers = {step.step for step in bad}
    replayed = (made for made in record.investigations if made.why == "loss" and made.step in numbers)
    investigated = next(replayed, None)
    if investigated is not None:
        yield cause_of(investigated, record)
        return
    unskipped = sum(1 for step in bad if not step.skipped)
    silent = " although no step was skipped" if unskipped == len(bad) else ""
    yield Finding(
        code="unknown",
        severity="error",
        step=bad[0].step,
        phase="forward",
        message=f"the loss is {_spelt(bad[0].loss)} from step {bad[0].step} on, in {len(bad)} of "
        f"{len(record.steps)} steps{silent}: the forward pass itself is not finite",
        remedy="compare with a run in FP32: --set precision.level=O0",
        evidence={"loss": bad[0].loss, "steps": len(bad), "steps_not_skipped": unskipped},
    )


def _is_explained(step: Step, record: Record) -> bool:
    spoilt = min((finding.step for finding in (*spoilt_weights(record), *weights_nonfinite(record))), default=math.inf)
    return step.step >= spoilt or blamed_in_batch(step, record) is not None


def _spelt(loss: float) -> str:
    return "NaN" if math.isnan(loss) else "inf" if loss > 0 else "-inf"
