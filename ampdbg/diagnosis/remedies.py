"""What cures each code that replays decide, and the finding that carries it to the line it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ampdbg.diagnosis.source_text import scales_after_its_product, takes_a_sum
from ampdbg.record.findings import Finding, Severity
from ampdbg.record.replays import Investigation, Producer

REMEDIES = {
    "forward-overflow": "run this op in FP32 with its inputs cast up",
    "gradient-overflow": "run this op in FP32 with its inputs cast up",
    "eps-underflow": "use an eps of at least 1e-6, or compute this statistic in FP32",
    "mask-constant": "use torch.finfo(x.dtype).min with masked_fill, or a boolean mask",
    "data-range": "normalise the data: it is beyond what FP16 can hold",
    "true-nan": "change the formula: clamp inside the square root, use a safe where; no precision helps",
    "infinite-loss": "filter these samples, or let the loss zero them (zero_infinity)",
    "divergence": "lower the learning rate, warm up, or clip gradients; no precision helps",
    "silent-overflow": "compute this statistic in FP32",
    "precision-loss": "run this op in FP32 with its inputs cast up",
    "gradient-underflow": "use a larger loss scale, or a dynamic one",
    "no-usable-scale": "run this op in FP32, or scale the losses apart",
    "unknown": "compare with a run in FP32: --set precision.level=O0",
}


AT_ITS_LINE: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "forward-overflow": (scales_after_its_product, ", or scale before the product where that keeps it below 65504"),
    "gradient-overflow": (takes_a_sum, "; take a mean in place of the sum"),
}
"""What is added to a remedy where the line of source tells that it applies."""

AT_ITS_OP: Mapping[tuple[str, str], str] = {
    ("gradient-overflow", "_to_copy"): "run the op that made this tensor in FP32 too: its gradient becomes half here",
    ("true-nan", "nll_loss"): "leave out batches whose every target is ignored (ignore_index): a mean over none is 0/0",
}
"""The remedy of a code where its op, by a part of its name, tells more."""

CASTS = {"forward": "the cast to half", "backward": "the cast of a gradient to half"}

NO_EVIDENCE: Mapping[str, object] = {}


def finding_at(
    code: str,
    made: Investigation,
    at: Producer | None,
    message: str,
    evidence: Mapping[str, object] = NO_EVIDENCE,
    *,
    severity: Severity = "error",
) -> Finding:
    """A finding at the op, module and line of a producer; evidence that is None is left out."""
    phase = at.phase if at else "backward" if made.why == "gradients" else "forward"
    return Finding(
        code=code,
        severity=severity,
        step=made.step,
        phase="data" if code == "data-range" else phase,
        message=message,
        remedy=remedy_of(code, at),
        module=at.module if at else "",
        op=at.op if at else "",
        parameter=at.parameter if at else "",
        source=at.source if at else None,
        evidence={key: value for key, value in evidence.items() if value is not None},
    )


def remedy_of(code: str, at: Producer | None) -> str:
    """What cures the code, with what the op and the line of source make possible besides."""
    if at is None:
        return REMEDIES[code]
    of_op = (text for (known, op), text in AT_ITS_OP.items() if known == code and op in at.op)
    applies, addition = AT_ITS_LINE.get(code, (None, ""))
    is_at_line = applies is not None and at.source is not None and applies(at.source.text)
    return next(of_op, REMEDIES[code] + (addition if is_at_line else ""))


def named(producer: Producer) -> str:
    """The op and its module, as messages say them; few know what a cast is called."""
    is_cast = producer.op.startswith("aten._to_copy")
    what = CASTS.get(producer.phase, producer.op) if is_cast else producer.op
    return f"{what} in {producer.module}" if producer.module else what
