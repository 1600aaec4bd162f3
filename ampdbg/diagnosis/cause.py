"""The cause of an unhealthy step, decided by its replays: precision, mathematics, data, or not known.

The order is that of DIAGNOSES: does the replay reproduce it at all, does FP32 diverge, is FP32 finite, and
only then which FP16 op is the producer and which code its numbers mean.
"""

from __future__ import annotations

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.mathematics import divergence, first_divergence, wrong_in_fp32_too
from ampdbg.diagnosis.producers import culprit, precision_cause
from ampdbg.diagnosis.remedies import finding_at
from ampdbg.record.findings import Finding
from ampdbg.record.replays import Investigation
from ampdbg.record.run import Record


def cause_of(made: Investigation, record: Record) -> Finding:
    """The root finding of an investigated step whose loss or gradients are not finite."""
    if made.reproduced == 0:
        message = f"the step went wrong in {made.reproduced} of {made.tries} replays: it does not come back every time"
        return finding_at("unknown", made, None, message, {"reproduced": made.reproduced, "tries": made.tries})
    if made.replays[0].error:
        return finding_at("unknown", made, None, f"the step could not be replayed: {made.replays[0].error}")
    if made.replays[1].error:
        return finding_at("unknown", made, None, f"the same step in FP32 could not be run: {made.replays[1].error}")
    diverging = first_divergence(made, record)
    if diverging is not None:
        return divergence(diverging, record)
    if not is_finite(made.replays[1]):
        return wrong_in_fp32_too(made)
    suspect = culprit(made)
    if suspect is None:
        return finding_at("unknown", made, None, "FP32 is finite, and no op was seen where FP16 goes wrong")
    return precision_cause(suspect)
