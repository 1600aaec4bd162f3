"""What was bad before or after a step: the batch, the weights, the buffers."""

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
"""The buffers of torch's norms, and what others call theirs of the same kind."""


@dataclass(frozen=True, eq=False)
class BadTensor(Evident):
    """A tensor that is not finite, of which nothing shows that it is meant; ``alike`` is how many more are,
    if any."""

    record: Record
    step: Step
    counts: TensorCounts
    alike: int | None = None

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """The step and the tensor; of a buffer also its module, and the op that overflowed, where that is known. NaN in
        weights that hurt no step is a warning."""
        if self.counts.kind == "batch":
            return {"step": self.step.step, "phase": "forward" if self.is_in_half else "data"}
        found = {"step": self.step.step, "phase": "forward", "parameter": self.counts.name}
        if self.is_left:
            op = {} if self.writer is None else {"op": self.writer.op, "source": self.writer.source}
            return {**found, **op, "module": self.counts.name.rpartition(".")[0]}
        return found | ({"severity": "warning"} if all(step.is_healthy for step in self.record.steps) else {})

    @property
    def numbers(self) -> Mapping[str, Any]:
        """How much of the tensor is not finite, and where that begins."""
        counts = {name: getattr(self.counts, name) for name in ("name", "inf", "nan", "size")}
        return counts | {"first_index": list(self.counts.first_index)}

    @property
    def is_in_half(self) -> bool:
        """It is stored in float16, whose limit what made it may have passed."""
        return self.counts.dtype == "float16"

    @property
    def is_left(self) -> bool:
        """It is a buffer that the step itself has left so."""
        return (self.counts.kind, self.counts.when) == ("buffer", "after")

    @cached_property
    def writer(self) -> Producer | None:
        """The op that overflowed in the step, where it was replayed and FP32 is finite there."""
        made = finite_in_fp32(self.record, self.step)
        return next((suspect.producer for suspect in suspects(made[0])), None) if made else None

    @property
    def is_shown(self) -> bool:
        """The loss of its step is lost, or an op that overflows is known."""
        return not math.isfinite(self.step.loss) or self.writer is not None

    @property
    def is_of_a_norm(self) -> bool:
        """It is a statistic of a norm, into which only what overflows writes inf; a script may write inf into a buffer
        of its own, such as the best loss so far."""
        return self.counts.name.rpartition(".")[2] in NORM_STATISTICS

    @property
    def finite_in_fp32(self) -> bool | None:
        """As evidence that the verdict reads: FP32 keeps it finite where an op is known."""
        return True if self.writer else None

    # In words

    @property
    def values(self) -> str:
        """How many of its values are inf and NaN."""
        kinds = ((self.counts.inf, "inf"), (self.counts.nan, "NaN"))
        parts = [f"{number} {name}" for number, name in kinds if number]
        return f"{' and '.join(parts)} among {self.counts.size} values"

    @property
    def leaf(self) -> str:
        """The leaf of the batch that it is."""
        return self.counts.name or "its tensor"

    @property
    def sample(self) -> int | None:
        """The first sample in which it is not finite."""
        return next(iter(self.counts.first_index), None)

    @property
    def left(self) -> str:
        """What a step has left in a buffer."""
        return f"buffer {self.counts.name} holds {self.values} after step {self.step.step}"

    @property
    def repair(self) -> str:
        """Where to look for what wrote bad weights."""
        at = self.step.step
        return f"check step {at - 1}, whose update wrote them" if at else CODES[WEIGHTS].remedy


def bad_batch(record: Record) -> Iterator[BadTensor]:
    """The first batch whose inf or NaN made its step fail."""
    found = ((step, blamed_in_batch(step, record)) for step in record.steps)
    yield from [BadTensor(record, step, counts) for step, counts in found if counts is not None][:1]


def blamed_in_batch(step: Step, record: Record) -> TensorCounts | None:
    """The leaf of the step's batch whose inf or NaN made it fail; None where there is none.

    Masks of -inf and NaN for missing values are common in batches: what a healthy step holds too, or what FP32 comes
    through, is meant.
    """
    bad = [counts for counts in step.nonfinite if counts.kind == "batch"]
    if not bad or step.is_healthy or finite_in_fp32(record, step):
        return None
    healthy = (other for other in record.steps if other.is_healthy)
    meant = {(one.name, one.nan > 0) for other in healthy for one in other.nonfinite if one.kind == "batch"}
    return next((counts for counts in bad if (counts.name, counts.nan > 0) not in meant), None)


def bad_weights(record: Record) -> Iterator[BadTensor]:
    """The first parameter or buffer that was bad before a forward pass.

    A buffer of -inf, or a frozen parameter, is mostly a mask: FP32 decides, or a healthy step that had it too. A
    skipped step writes no parameter: one that is bad after it was bad before it.
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
    """The first buffer that a step has left bad and FP32 leaves finite, with a lost loss or an op that shows why, or of
    a norm; else the first of all that are bad."""
    meant = {name for made in record.investigations if is_finite(made.fp32) for name in made.fp32.buffers}
    found = [BadTensor(record, step, counts) for step in record.steps for counts in step.nonfinite]
    left = [bad for bad in found if bad.is_left and bad.counts.name not in meant]
    yield from sorted(left, key=lambda bad: not (bad.is_shown or bad.is_of_a_norm))[:1]


def finite_in_fp32(record: Record, step: Step) -> list[Investigation]:
    """The investigations of the step whose replay in FP32 is finite."""
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
