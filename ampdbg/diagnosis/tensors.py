"""Findings about inf and NaN before or after a step: in the batch, the weights and the buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.decisions import Decision, Evident
from ampdbg.diagnosis.producers import UNKNOWN, suspects
from ampdbg.record.codes import CODES
from ampdbg.record.run import Investigation, Producer, Record, Step, TensorCounts

DATA, WEIGHTS, POISONED = "data-nonfinite", "weights-nonfinite", "buffer-poisoned"

NORM_STATISTICS = ("running_mean", "running_var")
"""Names of the buffers in torch's norms. Many libraries use them for similar buffers."""


@dataclass(frozen=True, eq=False)
class BadTensor(Evident):
    """A non-finite tensor without evidence that its values are intended. ``alike`` is the number of further such
    tensors, or None."""

    record: Record
    step: Step
    counts: TensorCounts
    alike: int | None = None

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """Return the step and the tensor. For a buffer, add its module and the op that overflowed, if known. NaN in
        weights is only a warning if every step is healthy."""
        if self.counts.kind == "batch":
            return {"step": self.step.step, "phase": "forward" if self.is_in_half else "data"}
        found = {"step": self.step.step, "phase": "forward", "parameter": self.counts.name}
        if self.is_left:
            op = {} if self.writer is None else {"op": self.writer.op, "source": self.writer.source}
            return {**found, **op, "module": self.counts.name.rpartition(".")[0]}
        return found | ({"severity": "warning"} if all(step.is_healthy for step in self.record.steps) else {})

    @property
    def numbers(self) -> Mapping[str, Any]:
        counts = {name: getattr(self.counts, name) for name in ("name", "inf", "nan", "size")}
        return counts | {"first_index": list(self.counts.first_index)}

    @property
    def is_in_half(self) -> bool:
        """True if the tensor is float16, so that the op that made it may have overflowed."""
        return self.counts.dtype == "float16"

    @property
    def is_left(self) -> bool:
        """True for a buffer that became non-finite in the step."""
        return (self.counts.kind, self.counts.when) == ("buffer", "after")

    @cached_property
    def writer(self) -> Producer | None:
        """The op that overflowed in the step. None unless a replay exists and is finite in FP32."""
        made = finite_in_fp32(self.record, self.step)
        return next((suspect.producer for suspect in suspects(made[0])), None) if made else None

    @property
    def is_shown(self) -> bool:
        """True if the step's loss is not finite, or an op that overflows is known."""
        return not math.isfinite(self.step.loss) or self.writer is not None

    @property
    def is_of_a_norm(self) -> bool:
        """True for a statistic of a norm. Only an overflow writes inf into it. A script may write inf into its own
        buffers, for example as the best loss so far."""
        return self.counts.name.rpartition(".")[2] in NORM_STATISTICS

    @property
    def finite_in_fp32(self) -> bool | None:
        """True if an op that overflows is known, since FP32 is finite then. The verdict reads this evidence."""
        return True if self.writer else None

    # Text of messages

    @property
    def values(self) -> str:
        kinds = ((self.counts.inf, "inf"), (self.counts.nan, "NaN"))
        parts = [f"{number} {name}" for number, name in kinds if number]
        return f"{' and '.join(parts)} among {self.counts.size} values"

    @property
    def leaf(self) -> str:
        return self.counts.name or "its tensor"

    @property
    def sample(self) -> int | None:
        """The first sample with a non-finite value."""
        return next(iter(self.counts.first_index), None)

    @property
    def left(self) -> str:
        return f"buffer {self.counts.name} holds {self.values} after step {self.step.step}"

    @property
    def repair(self) -> str:
        """The advice on what wrote the bad weights."""
        at = self.step.step
        return f"check step {at - 1}, whose update wrote them" if at else CODES[WEIGHTS].remedy


def bad_batch(record: Record) -> Iterator[BadTensor]:
    """Yield the first batch with inf or NaN that made its step fail."""
    found = ((step, blamed_in_batch(step, record)) for step in record.steps)
    yield from [BadTensor(record, step, counts) for step, counts in found if counts is not None][:1]


def blamed_in_batch(step: Step, record: Record) -> TensorCounts | None:
    """Return the batch leaf with the inf or NaN that made the step fail, or None. Masks of -inf and NaN for missing
    values are common in batches. They are intended if a healthy step has them too, or if FP32 is finite with them."""
    bad = [counts for counts in step.nonfinite if counts.kind == "batch"]
    if not bad or step.is_healthy or finite_in_fp32(record, step):
        return None
    healthy = (other for other in record.steps if other.is_healthy)
    meant = {(one.name, one.nan > 0) for other in healthy for one in other.nonfinite if one.kind == "batch"}
    return next((counts for counts in bad if (counts.name, counts.nan > 0) not in meant), None)


def bad_weights(record: Record) -> Iterator[BadTensor]:
    """Yield the first parameter or buffer that was non-finite before a forward pass.

    A buffer of -inf or a frozen parameter is usually a mask. It is intended if FP32 is finite, or if a healthy step had
    it. A skipped step writes no parameter, so a parameter that is bad after it was bad before.
    """
    last_healthy = max((step.step for step in record.steps if step.is_healthy), default=-1)
    for step in record.steps:
        stored = [one for one in step.nonfinite if one.kind != "batch"]
        before = [one for one in stored if one.when == "before" or (one.kind == "parameter" and step.skipped)]
        if step.step <= last_healthy or finite_in_fp32(record, step):
            before = [one for one in before if one.nan or (one.kind == "parameter" and not one.frozen)]
        if before:
            yield BadTensor(record, step, before[0], len(before) - 1 or None)
            return


def bad_buffers(record: Record) -> Iterator[BadTensor]:
    """Yield one buffer that a step made non-finite, unless it is not finite in FP32 either. Prefer a buffer of a
    step with a lost loss or a known overflow, or a statistic of a norm."""
    meant = {name for made in record.investigations if is_finite(made.fp32) for name in made.fp32.buffers}
    found = [BadTensor(record, step, counts) for step in record.steps for counts in step.nonfinite]
    left = [bad for bad in found if bad.is_left and bad.counts.name not in meant]
    yield from sorted(left, key=lambda bad: not (bad.is_shown or bad.is_of_a_norm))[:1]


def finite_in_fp32(record: Record, step: Step) -> list[Investigation]:
    """Return the investigations of the step with a finite FP32 replay."""
    return [made for made in record.investigations if made.step == step.step and is_finite(made.fp32)]


BATCHES: tuple[Decision[BadTensor], ...] = (
    Decision(
        UNKNOWN,
        "as below, but in a float16 tensor, which code outside of the step may have made so",
        lambda bad: bad.is_in_half,
        "the batch of step {step.step:d} holds {values} in {leaf}[, first in sample {sample}]; in that float16 "
        "tensor the data hold them, or the code that made or cast it overflowed",
        remedy="keep this tensor in float32 where its values are finite there; else repair the data",
    ),
    Decision(
        DATA,
        "the batch has inf or NaN, no healthy step's has, and the step fails in FP32 too",
        lambda bad: not bad.is_in_half,
        "the batch of step {step.step:d} holds {values} in {leaf}[, first in sample {sample}]",
    ),
)

STORED: tuple[Decision[BadTensor], ...] = (
    Decision(
        WEIGHTS,
        "a parameter or a buffer is inf or NaN before the forward pass, and is no mask that FP32 or a healthy step has",
        lambda _: True,
        "{counts.kind} {counts.name} holds {values} before the forward pass of step {step.step:d}"
        "[, and so do {alike} more]",
        remedy="{repair}",
    ),
)

BUFFERS: tuple[Decision[BadTensor], ...] = (
    Decision(
        POISONED,
        "a buffer is finite before the step and not after it, but finite in FP32; the loss is lost or an op overflows",
        lambda bad: bad.is_shown,
        "{left} and stays so: a skipped step does not restore buffers, and evaluation will use this one",
        {"finite_in_fp32": "finite_in_fp32"},
    ),
    Decision(
        POISONED,
        "the statistic of a norm is not finite at the end, or after a step examined for another reason",
        lambda bad: bad.is_of_a_norm and not bad.is_shown,
        "{left}, whose own loss is finite; an overflow, inf or NaN in another pass may have written it, even in "
        "one whose loss is unused",
        remedy="check the model's inputs for inf and NaN, and its ops for overflows; then reset the buffer",
    ),
    Decision(
        POISONED,
        "another buffer is not finite, and no loss shows it: information",
        lambda bad: not (bad.is_of_a_norm or bad.is_shown),
        "{left}, though the loss of that step is finite: the script may write that itself, or an op overflows "
        "that leads to no loss",
        remedy="",
        severity="info",
    ),
)
