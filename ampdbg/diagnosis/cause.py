"""The cause of a failing step: the facts from its replays, and the decision tables.

The order follows DIAGNOSES. Does the replay reproduce the failure? Does FP32 diverge? Is FP32 finite? Only then the
tables decide which FP16 op is the producer, and which code its numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.decisions import Decision, Evident, fact, first
from ampdbg.diagnosis.losses import DIVERGED, FEW_LOSSES, LEAPT, climbs_on, finite, leapt, losses_of, rose
from ampdbg.diagnosis.producers import (
    FAR_FROM_FP32,
    OVERFLOWS,
    UNKNOWN,
    Suspect,
    culprit,
    format_of,
    in_batch,
    named,
    placed,
    survivor,
)
from ampdbg.diagnosis.tensors import WEIGHTS, BadTensor, bad_batch, bad_weights, blamed_in_batch
from ampdbg.formats import FLOAT16
from ampdbg.levels import has_static_scale
from ampdbg.quantities import number
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.run import Investigation, Producer, Record, Replay, Step

GREW = 5.0
"""Weights that have grown by this factor since the start were changed too far by single updates. Training from
scratch makes them a few times as large."""

GREW_IN_A_LEAP = 2.0
"""The same factor if the loss has jumped in FP32 too."""

KEPT_SIZE = 1.05
"""Weights that have grown by less have not changed much in a few steps."""

LEAPS = 100.0
"""An FP32 loss this many times all before has left them for good, unless further steps bring it back."""

ITSELF = -1
"""The root of a finding that follows from nothing, whatever was found before it."""

WEIGHTS_GREW = "weights_grew"
"""Evidence key for the growth of weights that may be the cause of a finding."""

LARGE = 1e15
"""A few such values exceed FP32 when they are multiplied, or squared and summed."""

CALIBRATION, NO_USABLE_SCALE, DIVERGENCE = "scale-calibration", "no-usable-scale", "divergence"
OUT_OF_RANGE = "data-range"

SKIPS_IN_A_ROW = 5
"""This many consecutive skipped steps are not calibration: healthy models settle within four halvings of 65536."""

SELDOM_REPAIRED = 8
"""Gradients that a script repairs in at most one of this many steps cost little of the training."""

KEPT_SCALE = "kept_scale"
"""Evidence key for a loss scale that nothing lowers."""


class KeptScale(NamedTuple):
    """A loss scale that nothing lowers, its owner, and the advice for the user."""

    scale: float
    whose: str
    cure: str


@dataclass(frozen=True, eq=False)
class Evidence(Evident):
    """The facts about a replayed step.

    Attributes:
        made: the replays.
        run: the record of the step's optimizer alone.
    """

    made: Investigation
    run: Record

    # Results in FP32 and FP64

    @property
    def low(self) -> Replay:
        """The replay of the unchanged step."""
        return self.made.low

    @property
    def half(self) -> str:
        """The low-precision format of the step, as messages name it."""
        return format_of(self.low.dtype).short

    @property
    def of_earlier_pass(self) -> str:
        """The format of an earlier pass; "" in the first step."""
        return self.half if self.made.step else ""

    @property
    def is_captured(self) -> bool:
        """True if the step is replayed from a capture, and not by the process in which it failed."""
        return self.run.script is not None and self.run.command not in ("run", "watch")

    @property
    def has_fp32_answer(self) -> bool:
        """True if the failure was reproduced, and the step ran in FP32 without an error."""
        return self.made.reproduced > 0 and not self.made.reference.error

    @property
    def is_fp32_finite(self) -> bool:
        """True if loss and gradients are finite in FP32; False without an FP32 replay."""
        return is_finite(self.made.fp32)

    @property
    def is_of_precision(self) -> bool:
        """True if the step is finite in FP32 and does not diverge."""
        return self.has_fp32_answer and self.is_fp32_finite and not self.is_divergence

    @property
    def is_fp64_decisive(self) -> bool:
        """True if neither FP32 nor FP64 is finite, so that the mathematics is wrong. FP64 runs only if FP32 is not
        finite."""
        fp64 = self.made.wide
        return fp64 is not None and not (self.is_fp32_finite or fp64.error or is_finite(fp64))

    @property
    def is_infinite(self) -> bool:
        """True if the loss is infinite in FP32 and in FP64."""
        return [replay.loss for replay in (self.made.fp32, self.made.wide) if replay] == [math.inf, math.inf]

    @cached_property
    def begins_in_fp32(self) -> Producer | None:
        """The op where FP32 fails. An op that makes NaN from finite numbers is preferred, because inf may be
        intended. For bad gradients, an op of either pass comes first if its inf or NaN reaches them."""
        made = () if self.is_fp32_finite else self.made.reference.producers
        phase = "forward" if self.is_of_loss else "backward"
        reaching = [one for one in made if one.reaches_gradients and not self.is_of_loss]
        return min(reaching or [one for one in made if one.phase == phase], key=lambda one: not one.nan, default=None)

    @property
    def is_of_loss(self) -> bool:
        """True if the loss is not finite. The loss scale may be the cause if the loss is computed from gradients."""
        return self.made.why == "loss" or not math.isfinite(self.low.loss)

    @property
    def begins(self) -> str:
        """The name of ``begins_in_fp32``."""
        return named(self.begins_in_fp32) if self.begins_in_fp32 else ""

    @property
    def left_out(self) -> str:
        """The note that the loss does not contain the fault, to follow the name of the op."""
        begins = self.begins_in_fp32
        is_left_out = begins is not None and begins.phase == "forward" and begins.reaches_gradients
        return ", which the loss leaves out and the gradients do not" if is_left_out else ""

    @property
    def unit(self) -> str:
        """The unit of the op's values. torch's CTC loss has one value for each sample before any mean."""
        return "samples" if "ctc_loss" in self.begins else "values"

    @property
    def largest(self) -> float | None:
        """The largest input of the op that fails in FP32, if squares and sums of that size exceed FP32."""
        begins = self.begins_in_fp32
        return begins.input_largest if begins and begins.input_largest > LARGE else None

    @property
    def is_beyond_fp32(self) -> bool:
        """True if the op's values exceed FP32's range. Otherwise FP32 rounds too coarsely."""
        begins = self.begins_in_fp32
        return begins is not None and (not begins.nan or self.largest is not None)

    @property
    def why_in_fp32(self) -> str:
        """The result of FP64 for a step that is not finite in FP32."""
        if self.made.wide and self.made.wide.error:
            return f"FP64 raised an error: {self.made.wide.error}"
        rounds = f"FP32 rounds too coarsely, not only {self.half}"
        exceeds = f"its values exceed FP32's range, not only {self.half}'s"
        return f"it is finite in FP64: {self.at_a_pole or (exceeds if self.is_beyond_fp32 else rounds)}"

    @property
    def at_a_pole(self) -> str:
        """The pole to which FP32 rounded the op's argument, in words; "" if none."""
        begins = self.begins_in_fp32
        if begins is None or not begins.divides_by_zero:
            return ""
        return f"it {Suspect(self.made, begins).takes_a_pole_in('FP32')}, not only {self.half}"

    @property
    def repair_in_fp32(self) -> str:
        """The advice for a step that fails in FP32."""
        if self.largest is not None:
            return "bring these values down: look for weights, divisors or inputs of that size"
        if self.at_a_pole:
            return "keep this value away from there: clamp it where it is made, or change the formula"
        grows = "subtract the largest value before it grows beyond FP32, as torch.logsumexp and log_softmax do"
        return grows if self.is_beyond_fp32 else "change the formula where it divides or cancels"

    # The op that fails only in half

    @cached_property
    def suspect(self) -> Suspect | None:
        return culprit(self.made)

    @property
    def leaf(self) -> str | None:
        """The batch leaf that half cannot hold, if the op is its cast."""
        return None if self.suspect is None else self.suspect.leaf

    @cached_property
    def outlier(self) -> str | None:
        """The batch leaf with the largest value, if half cannot hold it and only this step's loss is off. A dropout
        or a product of such a value overflows, although it is not the cast of the batch."""
        largest = self.made.batch_largest
        beyond = {name: value for name, value in largest.items() if value >= FLOAT16.overflow_threshold}
        return max(beyond, key=largest.__getitem__, default=None) if self.is_off_alone else None

    @property
    def in_batch(self) -> str:
        """The largest value of ``outlier`` and its position."""
        return in_batch(self.made, self.outlier or "")

    @property
    def is_off_alone(self) -> bool:
        """True if FP32's loss of the step is many times all before, or not finite, and nothing led there: the losses
        before had not risen, and the weights have not grown. False for a replay of modules, which has no loss."""
        if self.made.reach != "whole" or not self.losses or self.has_grown_or_risen:
            return False
        return not self.in_fp32 <= LEAPT * max(map(abs, self.losses))

    @property
    def rewritten(self) -> list[str]:
        """The rewritten buffers, each with its largest value."""
        return [f"{name} (up to {number(size)})" for name, size in self.made.rewritten.items()]

    @property
    def last_loss(self) -> float:
        return self.losses[-1]

    @property
    def in_fp32(self) -> float:
        """The magnitude of the FP32 loss; NaN without an FP32 loss. A replay of modules has a sum and no loss."""
        return abs(self.made.reference.loss) if self.made.reach == "whole" else math.nan

    # Results at lower loss scales

    @property
    def survivor(self) -> Replay | None:
        return survivor(self.made)

    @property
    def usable_scale(self) -> float:
        """The loss scale of ``survivor``; 0 without one, or if gradients are lost there."""
        return self.survivor.scale if self.survivor and not self.survivor.lost else 0.0

    @property
    def there(self) -> str:
        """The result of ``survivor``, to follow the failure at the step's own loss scale."""
        is_backward = self.suspect is not None and self.suspect.producer.phase == "backward"
        return "the whole step is finite" if is_backward else "the gradients are finite, but differ from FP32's"

    @cached_property
    def kept_scale(self) -> KeptScale | None:
        """The loss scale that nothing lowers: a scaler's limit, the config's static scale, or the script's own."""
        floor, is_unscaled = scale_floor(self.run.steps), not any(one.scaler for one in self.run.steps)
        if floor is not None and not is_unscaled:
            return KeptScale(
                floor, f"the loss scale, whose lower limit is {number(floor)},", "let GradScaler lower the scale"
            )
        is_kept = floor is not None or len({one.scale for one in self.run.steps}) == 1
        is_own = self.low.scale > 1.0 and self.run.script is not None and is_unscaled and is_kept
        whose = "the script's own" if is_own else "the static" if has_static_scale(self.run.config) else ""
        cure = f"use a loss scale of {self.usable_scale or 1.0:g}, or a dynamic one"
        return KeptScale(self.low.scale, f"{whose} loss scale {number(self.low.scale)}", cure) if whose else None

    # Earlier steps of the run

    @cached_property
    def before(self) -> list[Step]:
        return [step for step in self.run.steps if step.step < self.made.step]

    @cached_property
    def losses(self) -> list[float]:
        return losses_of(self.before)

    @cached_property
    def diverges(self) -> bool:
        """True if FP32 losses climb from this step on. If FP32 is not finite here, True if the earlier losses had
        risen."""
        climbs = climbs_on(self.losses, self.made.continuation)
        return self.has_fp32_answer and (climbs or (not self.is_fp32_finite and rose(self.losses, are_of_batches=True)))

    @cached_property
    def divergence(self) -> Evidence | None:
        """The first step up to this one that diverges in FP32. Later failures follow from it."""
        earlier = (Evidence(one, self.run) for one in self.run.investigations if one.step < self.made.step)
        shown = (one for one in (self, *earlier) if one.diverges)
        return min(shown, key=lambda one: one.made.step, default=None)

    @cached_property
    def has_risen(self) -> bool:
        """True if the losses before the step had left the first losses for good."""
        return rose(self.losses, are_of_batches=True) or leapt(self.losses)

    @property
    def has_grown_or_risen(self) -> bool:
        """True if the losses before had risen, or single updates have changed the weights too far."""
        return self.has_risen or self.made.weights_grew > GREW

    @cached_property
    def is_divergence(self) -> bool:
        """True if the run diverges in FP32 too. A batch that half cannot hold does not count, since FP32 continues
        with it."""
        is_as_it_began = not self.has_risen and self.made.weights_grew < KEPT_SIZE
        is_of_its_batch = self.divergence is self and self.leaf is not None and is_as_it_began
        return self.divergence is not None and not is_of_its_batch

    @cached_property
    def is_in_doubt(self) -> bool:
        """True if only modules were replayed, and a diverging learning rate may cause the overflow. The losses rose,
        or they are few and the weights may have grown. A learning rate cannot cause a bad batch."""
        losses, has_kept_size = self.losses, self.made.weights_grew != 1.0 and self.made.weights_grew < KEPT_SIZE
        is_open = self.made.reach == "modules" and self.leaf is None and bool(losses)
        if not is_open or all(step.skipped for step in self.before):
            return False
        are_few = len(losses) < FEW_LOSSES and not has_kept_size  # the growth is 1 if unknown
        return are_few or losses[-1] > max(losses[:FEW_LOSSES]) or self.has_risen

    @property
    def climb(self) -> str:
        """How the run diverges from this step on, in words."""
        climb = self.made.continuation
        if climb and all(step.skipped for step in self.before):  # same weights: only the batches differ
            return f"the loss is {number(climb[0])}, and steps in FP32 on the same batch lead to {number(climb[-1])}"
        reached = max(finite((self.losses[-1], self.made.reference.loss)))
        rose_from = f"the loss rose from {number(min(self.losses))} to {number(reached)}"
        return f"{rose_from}, and keeps rising in further steps in FP32"

    @cached_property
    def taken(self) -> list[float]:
        """The losses of the taken steps before. Losses of skipped steps may come from the same weights as this one."""
        return losses_of(step for step in self.before if not step.skipped)

    @property
    def largest_taken(self) -> float:
        """The largest magnitude of ``taken``; infinite without any."""
        return max(map(abs, self.taken), default=math.inf)

    @property
    def far_loss(self) -> float | None:
        """The FP32 loss if it has left the losses in ``taken`` too, else None."""
        return self.in_fp32 if self.in_fp32 > LEAPS * self.largest_taken else None

    @property
    def has_leapt(self) -> bool:
        """True if the weights have grown, and the FP32 loss has left all before and does not come back."""
        further = self.made.continuation
        comes_back = not further or any(loss <= DIVERGED * self.largest_taken for loss in further)
        return self.made.weights_grew > GREW_IN_A_LEAP and self.far_loss is not None and not comes_back

    # The finding

    @property
    def of_op(self) -> str:
        """The message about the op's numbers, regardless of the cause."""
        return first(OPS, self).says(self)

    @property
    def of_half(self) -> str:
        """The message about half precision, regardless of the weights and the loss scale."""
        return first(IN_HALF, self).says(self)

    @property
    def at(self) -> Producer | None:
        """The op where the failure starts: the suspect in half, or FP32's op if FP32 fails too."""
        if not self.has_fp32_answer or self.is_divergence:
            return None
        return self.suspect.producer if self.suspect and self.is_fp32_finite else self.begins_in_fp32

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """Return the step, op, module and line of the failure, and the remedy of the row's code there."""
        shows = self.divergence if self.is_divergence and self.divergence else self
        return placed(shows.made, row.code, self.at)

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The op's value, the limit of its format, and a loss scale that works."""
        op = self.suspect
        if op is None or not self.is_of_precision:
            return {}
        reached = {"reached": op.producer.output_largest} if op.departs else {"limit": op.format.largest}
        scales = {"loss_scale": op.low.scale, "survives_scale": fact(self, "survivor.scale")}
        index = self.made.batch_index.get(op.leaf or "", ())
        of_batch = {} if op.leaf is None else {"name": op.leaf, "first_index": list(index)}
        return {"value": op.value, **reached, **scales, **of_batch}

    @cached_property
    def cause(self) -> Finding:
        """The finding of the first row that holds, dated to the first step with the same failure. A bad batch
        belongs to its own step. A divergence begins at the step that shows it in its replays."""
        found = first(CAUSES, self).finding(self)
        is_apart = found.phase not in OVERFLOWS or found.code == DIVERGENCE or found.step != self.made.step
        if is_apart or self.began == found.step:
            return found
        message = f"{found.message}; step {found.step} was replayed, and every step from {self.began} on was skipped"
        evidence = {**found.evidence, "replayed_step": found.step}
        return replace(found, step=self.began, message=message, evidence=evidence)

    @cached_property
    def began(self) -> int:
        """The first of consecutive steps that were withheld and fail like this one, on the same weights.

        It is this step if the replay of such a step fails at another op, as while a scale settles. The place of the
        steps in between is then unknown. In a run of a config, every lost loss has its own replay.
        """
        is_of_loss, number = self.made.why == "loss", self.made.step
        skipped = [] if is_of_loss and self.run.script is None else [step for step in self.run.steps if step.skipped]
        like_it = {step.iteration: step.step for step in skipped if math.isfinite(step.loss) != is_of_loss}
        traced = (one for one in self.run.investigations if one.reproduced and one.low.producers)
        sites = {one.step: one.low.producers[0].site for one in traced}
        iteration = next((step.iteration for step in self.run.steps if step.step == number), number)
        row = [number]
        while iteration - len(row) in like_it:
            row.append(like_it[iteration - len(row)])
        here = self.low.producers[0].site if self.low.producers else None
        is_elsewhere = here is not None and any(sites.get(step, here) != here for step in row[1:])
        return number if is_elsewhere else row[-1]


def scale_floor(steps: Sequence[Step]) -> float | None:
    """Return the loss scale that stays although every step is skipped, such as a scaler's lower limit; else None."""
    last = steps[-SKIPS_IN_A_ROW:]
    is_stuck = len(last) == SKIPS_IN_A_ROW and len({(step.scaler, step.scale) for step in last}) == 1
    return last[-1].scale if is_stuck and all(step.skipped for step in last) and last[-1].scale > 1.0 else None


# The decision tables


def _of_op(code: str, when: str, holds: Callable[[Suspect], bool], message: str) -> Decision[Evidence]:
    """Return a row about the op that explains a step. The step is finite in FP32 and not in half."""
    return Decision(code, when, lambda it: it.suspect is not None and holds(it.suspect), message + LOWER + LEAP)


LOWER = "[; at a loss scale of {survivor.scale} {there}]"
"""The highest lower scale at which the whole step is finite. The op alone may be finite at a higher one."""

LEAP = "[; in FP32 too the loss jumps to {far_loss}, where it was at most {largest_taken} before]"

OPS = (
    _of_op(
        OUT_OF_RANGE,
        "the op is the cast of the batch itself, which holds values beyond FP16's limit",
        lambda op: op.leaf is not None,
        "the batch holds {suspect.in_batch}, above {suspect.limit}",
    ),
    _of_op(
        "mask-constant",
        "the op overflows on a constant that the code writes, and nothing else explains it",
        lambda op: op.is_constant,
        "{suspect.name} writes a constant of magnitude {suspect.constant} into a {suspect.format.short} tensor: there "
        "it becomes infinite, and fully masked rows become NaN",
    ),
    _of_op(
        FAR_FROM_FP32,
        "the op is NaN, for the root of a number that half has below zero and FP32 does not",
        lambda op: op.is_below_zero,
        "{suspect.name} takes the root of a number that is below zero in {suspect.format.short} and not in FP32",
    ),
    _of_op(
        "eps-underflow",
        "the op divides by, or takes the logarithm of, a value that half alone rounds to a pole",
        lambda op: op.is_flushed and not op.departs,
        "{suspect.name} {suspect.takes_a_pole} and FP32 does not",
    ),
    _of_op(
        "eps-underflow",
        "the same, for an op whose finite result is at least 16 times FP32's, so that a later op overflows",
        lambda op: op.is_flushed,
        "{suspect.departed}: it {suspect.takes} a value that half precision has rounded to almost nothing",
    ),
    _of_op(
        FAR_FROM_FP32,
        "the op is finite and at least 16 times FP32's own value: its operands cancel, and a later op overflows",
        lambda op: op.departs,
        "{suspect.departed}: its operands cancel, or lost their digits before it",
    ),
    _of_op(
        OVERFLOWS["forward"],
        "an op of the forward pass is finite in FP32, above 0.9 of FP16's limit",
        lambda op: op.overflows and op.producer.phase == "forward",
        "{suspect.reaches}",
    ),
    _of_op(
        OVERFLOWS["backward"],
        "an op of the backward pass is finite in FP32, above 0.9 of FP16's limit at the step's loss scale",
        lambda op: op.overflows,
        "{suspect.reaches}",
    ),
    _of_op(
        OVERFLOWS["backward"],
        "an op of the backward pass makes inf of finite numbers, which a lower loss scale makes finite",
        lambda op: op.overflows_in_half_alone,
        "{suspect.name} exceeds {suspect.limit} at a loss scale of {suspect.low.scale}"
        "[, where FP32 reaches only {suspect.value}]",
    ),
    _of_op(
        UNKNOWN,
        "no overflow explains the op that fails in half alone",
        lambda _: True,
        "{suspect.name} is not finite in {suspect.format.short}[ and reaches only {suspect.magnitude} in FP32], and "
        "no overflow explains it",
    ),
)
"""The rows that decide by the numbers of the op."""

PRECISE: tuple[Decision[Evidence], ...] = (
    Decision(
        NO_USABLE_SCALE,
        "the backward pass overflows, and at the first lower loss scale that is finite gradients are flushed to zero",
        lambda it: it.survivor is not None and not it.usable_scale and first(OPS, it).code == OVERFLOWS["backward"],
        "{suspect.bare_name} overflows at a loss scale of {low.scale}; at {survivor.scale} it does not, but there half "
        "precision flushes the gradient of {survivor.lost} to zero" + LEAP,
        {"lost": "survivor.lost"},
        CODES[NO_USABLE_SCALE].remedy,
    ),
    *OPS,
)

UNDECIDED: tuple[Decision[Evidence], ...] = (
    Decision(
        UNKNOWN,
        "the step is finite in FP32, and no op is known to fail in half",
        lambda it: it.suspect is None,
        "the step is finite in FP32, and ampdbg found no op that fails in {half}"
        "[, where it raises an error: {low.error}]",
    ),
    Decision(
        UNKNOWN,
        "only modules were replayed, and the losses before the step do not rule out a diverging learning rate",
        lambda it: it.is_in_doubt,
        "{of_op}; a diverging learning rate may be the cause: the losses before it rose, or are too few to rule it out",
    ),
)
"""Rows for a step that is finite in FP32, if the fault in half is unknown."""

IN_HALF = (*UNDECIDED, *PRECISE)
"""Rows about the fault in half, regardless of the weights and the loss scale."""

WHERE = "[, first in {begins}]{left_out}"
"""The place of a fault that FP32 shows too."""

OF_HALF: tuple[Decision[Evidence], ...] = (
    *UNDECIDED,
    Decision(
        OUT_OF_RANGE,
        "the batch holds values beyond FP16's limit, and FP32's loss of the step is over 1000 times all before it",
        lambda it: it.outlier is not None and it.leaf is None,
        "the batch holds {in_batch}, above FP16's limit of 65,504: {of_half}",
    ),
    Decision(
        DIVERGENCE,
        "the weights are over twice as large as at the start, and FP32's loss is beyond all before it too",
        lambda it: it.has_leapt and CODES[first(PRECISE, it).code].verdict == "precision",
        "the weights are {made.weights_grew} times as large as at the start of the run; with them {of_half}",
        {WEIGHTS_GREW: "made.weights_grew"},
    ),
    Decision(
        UNKNOWN,
        f"the weights are over {GREW:g} times as large as at the start of the run",
        lambda it: it.made.weights_grew > GREW and CODES[first(PRECISE, it).code].verdict == "precision",
        "{of_half}; the weights are {made.weights_grew} times as large as at the start of the run: the learning "
        "rate may be too large",
        {WEIGHTS_GREW: "made.weights_grew"},
        "lower the learning rate; if the weights keep their size and the step still fails, precision is the cause",
    ),
    *PRECISE,
)
"""Rows for a step that is finite in FP32."""

CAUSES: tuple[Decision[Evidence], ...] = (
    Decision(
        UNKNOWN,
        "everything that this process computed is finite, and values from another process are not",
        lambda it: it.made.is_of_others,
        "step {made.step}: everything that this process computed is finite, and values from another process are not",
        remedy="read the records of the other ranks, beside this one",
    ),
    Decision(
        UNKNOWN,
        "a captured step does not fail any more when it is replayed",
        lambda it: it.is_captured and not it.made.reproduced,
        "step {made.step} does not fail in any of {made.tries} replays: its loss is {made.low.loss}, and was "
        "{made.loss} when it was captured",
        {"reproduced": "made.reproduced", "tries": "made.tries"},
        remedy="if its code has changed since, that is the cure; else it depends on what no capture holds",
    ),
    Decision(
        UNKNOWN,
        "no replay of the unchanged step fails",
        lambda it: not it.made.reproduced,
        "none of {made.tries} replays reproduced the failure",
        {"reproduced": "made.reproduced", "tries": "made.tries"},
    ),
    Decision(
        UNKNOWN,
        "only some replays of the unchanged step fail, and none was made in FP32",
        lambda it: it.made.fp32 is None,
        "{made.reproduced} of {made.tries} replays reproduced the failure, and none was made in FP32",
        {"reproduced": "made.reproduced", "tries": "made.tries"},
    ),
    Decision(
        UNKNOWN,
        "the same step raises an error in FP32",
        lambda it: not it.has_fp32_answer,
        "the same step in FP32 raised an error: {made.fp32.error}",
    ),
    Decision(
        WEIGHTS,
        "the script wrote a value beyond FP16 into a buffer right before the step, and FP32's loss is lost, or over "
        "1000 times all before it",
        lambda it: bool(it.made.rewritten) and it.is_off_alone,
        "right before step {made.step} the script itself wrote {rewritten:buffer}: {rewritten}; in FP32 too the loss "
        "goes from {last_loss} to {made.fp32.loss}",
        {"buffers": "made.rewritten"},
        remedy="look at what the script writes there, or keep it within half's range",
    ),
    Decision(
        DIVERGENCE,
        "the loss keeps rising in FP32 on the same batch; or FP32 is not finite, and the loss had risen",
        lambda it: it.is_divergence,
        "{divergence.climb}",
        {"continuation": "divergence.made.continuation"},
    ),
    Decision(
        DIVERGENCE,
        f"FP32 is not finite, on weights over {GREW:g} times as large as at the start of the run",
        lambda it: not it.is_fp32_finite and it.made.weights_grew > GREW,
        "the step is not finite in FP32 either"
        + WHERE
        + ", on weights {made.weights_grew} times as large as at the start",
        {WEIGHTS_GREW: "made.weights_grew"},
    ),
    Decision(
        WEIGHTS,
        "FP32 is not finite either, and the first op that is not takes inf or NaN from outside the step",
        lambda it: it.begins_in_fp32 is not None and it.begins_in_fp32.is_given,
        "step {made.step} is not finite in FP32 either" + WHERE + "; inf or NaN came into it from outside"
        "[, perhaps from an earlier pass in {of_earlier_pass}]",
        remedy="find what left it: a value of the script's own, or an earlier pass, which {half} may have overflowed",
    ),
    Decision(
        "infinite-loss",
        "the loss is infinite in FP32 and in FP64",
        lambda it: it.is_infinite,
        "the loss is infinite in FP32 and FP64 too"
        + WHERE
        + "[: {begins_in_fp32.inf} of {begins_in_fp32.size} {unit}]",
    ),
    Decision(
        "true-nan",
        "the step is not finite in FP32, nor in FP64",
        lambda it: it.is_fp64_decisive,
        "the step is not finite in FP32 and FP64 either" + WHERE,
    ),
    Decision(
        UNKNOWN,
        "the step is not finite in FP32, and FP64 is finite or raised an error",
        lambda it: not it.is_fp32_finite,
        "the step is not finite in FP32 either" + WHERE + "[ on values of up to {largest}]; {why_in_fp32}",
        {"finite_in_fp32": "is_fp32_finite", "largest": "largest"},
        "{repair_in_fp32}; no pin helps, since FP32 fails too",
    ),
    Decision(
        CALIBRATION,
        "no scaler lowers the loss scale (static, the script's own, or with a floor), and a lower one would do",
        lambda it: it.kept_scale is not None and it.usable_scale > 0.0 and CODES[first(IN_HALF, it).code].keeps_scale,
        "{kept_scale.whose} is too large for the gradients of this step: {of_half}",
        {KEPT_SCALE: "kept_scale.scale"},
        "{kept_scale.cure}, which adapts by itself; no pin is needed",
    ),
    *OF_HALF,
)
"""The rows for a step with a non-finite loss or gradients. The first that holds is the root."""


# Non-finite losses, and bad gradients that reached the weights


def nonfinite_loss(record: Record) -> Iterator[Finding]:
    """Yield the findings for losses of inf or NaN, and for bad gradients that reached the weights.

    Calibration explains neither. Replays decide the cause, and without them the code is ``unknown``. Steps that bad
    weights or a bad batch explain are omitted. The first optimizer with such a step counts, since NaN spreads to the
    rest. Another optimizer counts if the step before its failure had a finite loss: no NaN came from there.
    """
    each = [finding for timeline in record.timelines for finding in LostLosses(timeline, record).findings()]
    sound = {step.step for step in record.steps if math.isfinite(step.loss)}
    found = sorted(each, key=lambda finding: finding.step)
    yield from found[:1]
    yield from (replace(one, root=ITSELF) for one in found[1:] if one.step - 1 in sound)


@dataclass(frozen=True, eq=False)
class LostLosses(Evident):
    """The steps of one optimizer with a non-finite loss that no earlier fault explains.

    Attributes:
        run: the record of the optimizer alone.
        whole: the record of all optimizers.
    """

    run: Record
    whole: Record

    @cached_property
    def steps(self) -> list[Step]:
        spoilt = (*(bad.step.step for bad in bad_weights(self.whole)), self.whole.ledger.spoilt_step)
        first_spoilt = min((number for number in spoilt if number is not None), default=math.inf)
        before = (step for step in self.run.steps if step.step < first_spoilt)
        unexplained = (step for step in before if not math.isfinite(step.loss))
        return [step for step in unexplained if not blamed_in_batch(step, self.whole) and not self._is_of_scale(step)]

    @cached_property
    def repaired(self) -> list[Step]:
        """The steps whose gradients the script has repaired; empty if they are few."""
        found = [step for step in self.run.steps if step.repaired]
        return found if len(found) * SELDOM_REPAIRED > self.run.steps_run else []

    @property
    def many(self) -> int:
        """The number of steps with a lost loss, including omitted steps."""
        return len(self.steps) + self.whole.left_out.lost

    @property
    def whose(self) -> str:
        """The suffix that names the optimizer, if there are several."""
        return self.whole.whose(self.run)

    @property
    def taken(self) -> int:
        """The number of ``steps`` that no scaler withheld."""
        return sum(not step.skipped for step in self.steps)

    @property
    def silently(self) -> str:
        """The note that no scaler withheld the steps; "" if one did."""
        if any(step.skipped for step in self.steps):
            return ""
        is_scaled = any(step.scaler for step in self.steps)
        return ", and the scaler skipped none of them" if is_scaled else ", and no scaler was used"

    @cached_property
    def replayed(self) -> list[Evidence]:
        numbers = {step.step for step in self.steps}
        of_loss = (made for made in self.run.investigations if made.why == "loss" and made.step in numbers)
        return [Evidence(made, self.run) for made in of_loss]

    @cached_property
    def first_spoilt(self) -> BadTensor | None:
        """The first parameter that is not finite after a step."""
        stored = (BadTensor(self.whole, step, counts) for step in self.whole.steps for counts in step.nonfinite)
        return next((one for one in stored if (one.counts.kind, one.counts.when) == ("parameter", "after")), None)

    @cached_property
    def origin(self) -> Step:
        """The step where the failure begins. With spoilt weights, it is the first unhealthy step that was taken."""
        bad = (step for step in self.whole.steps if not step.is_healthy)
        taken = (step for step in bad if not step.skipped and self.replayed)
        return next(taken, self.applied or self._begins[0])

    @cached_property
    def spoiling(self) -> list[Step]:
        """The first step that applied non-finite gradients, or else after which a parameter is not finite. Other
        optimizers' timelines have none, and neither has a run whose parameters are finite after each step."""
        if self.first_spoilt is None or any(bad_weights(self.whole)):
            return []
        applied = (one for one in self.whole.steps if one.found_inf and not (one.skipped or one.repaired))
        first = next(applied, self.first_spoilt.step)
        return [step for step in self.run.steps if step is first]

    @property
    def _begins(self) -> list[Step]:
        return self.steps or self.repaired or self.spoiling

    @cached_property
    def applied(self) -> Step | None:
        """The first earlier step that applied non-finite gradients to the weights."""
        before = (step for step in self.whole.steps if step.step < self._begins[0].step)
        return next((step for step in before if step.found_inf and not step.skipped), None)

    @property
    def what(self) -> str:
        """The non-finite value at ``origin``."""
        is_of_loss = not math.isfinite(self.origin.loss)
        of_gradients = f"{'gradients' if self.origin.found_inf else 'weights'} are not finite"
        return f"the loss is {number(self.origin.loss)}" if is_of_loss else of_gradients

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        phase = "backward" if math.isfinite(self.origin.loss) else "forward"
        spoilt = fact(self, "first_spoilt.counts.name") if self.replayed else ""
        return {"step": self.origin.step, "phase": phase, "parameter": spoilt or ""}

    def findings(self) -> Iterator[Finding]:
        """Yield the cause that replays show, else a row of ``LOST``."""
        # Without a scaler, bad gradients of a taken step make the weights non-finite, unless the script repairs them.
        applied = (step for step in self.run.steps if not (step.skipped or step.repaired))
        taken = {step.step: step for step in (*applied, *self.repaired)}
        of_taken = (made for made in self.run.investigations if made.why == "gradients" and made.step in taken)
        bad = next((made for made in of_taken if not blamed_in_batch(taken[made.step], self.run)), None)
        if bad is not None and all(bad.step <= step.step for step in self.steps):
            yield Evidence(bad, self.run).cause
            return
        spoilt_at = self.first_spoilt.step.step if self.first_spoilt else math.inf
        shown = (one for one in self.replayed if one.is_fp32_finite or one.made.step <= spoilt_at)
        surest = min(shown, key=lambda one: one.is_fp32_finite and one.is_in_doubt, default=None)
        if surest is not None:
            yield surest.cause
        elif self._begins and (self.replayed or not self.follows_a_bad_batch):
            yield first(LOST, self).finding(self)

    @property
    def follows_a_bad_batch(self) -> bool:
        """True if a script had a bad batch up to the first of ``steps``. Its batch is known only if it was replayed."""
        is_before = any(bad.step.step <= self._begins[0].step for bad in bad_batch(self.whole))
        return self.run.script is not None and is_before

    def _is_of_scale(self, step: Step) -> bool:
        """True if the loss is computed from scaled gradients, and the loss scale was too high. All taken steps had a
        lower scale and one came later, or a failing step was replayed for its gradients."""
        taken = [other for other in self.run.steps if not other.skipped]
        is_first_descent = bool(taken) and taken[-1].step > step.step and all(one.scale < step.scale for one in taken)
        gone = {other.step for other in self.run.steps if not math.isfinite(other.loss)}
        is_shown = any(made.why == "gradients" and made.step in gone for made in self.run.investigations)
        return self.run.scales_gradients and step.skipped and (is_first_descent or is_shown)


LOST: tuple[Decision[LostLosses], ...] = (
    Decision(
        UNKNOWN,
        "a parameter is not finite after a step, no loss that ampdbg saw is lost, and no replay shows why",
        lambda lost: not (lost.steps or lost.repaired),
        "{what} at step {origin.step:d}, and {first_spoilt.counts.name} holds {first_spoilt.values} after step "
        "{first_spoilt.step.step:d}: ampdbg saw no loss that is not finite, and replayed no such step",
    ),
    Decision(
        UNKNOWN,
        f"the script replaces gradients of inf or NaN in over one step of {SELDOM_REPAIRED}, and no replay shows why",
        lambda lost: not lost.steps,
        "the script replaced gradients that were not finite in {repaired:step} of {run.steps_run:d}, first in step "
        "{origin.step:d}; no replay shows the cause",
    ),
    Decision(
        UNKNOWN,
        "an earlier step spoilt the weights, and ampdbg replayed no step before it",
        lambda lost: bool(lost.replayed),
        "{what} at step {origin.step}, and no scaler skipped it; since then {first_spoilt.counts.name} "
        "and others are NaN, so later steps show nothing more",
    ),
    Decision(
        UNKNOWN,
        "gradients that were not finite went into the weights, and no replay shows why",
        lambda lost: lost.applied is not None,
        "{what} at step {origin.step:d}, and went into the weights: the loss of every later step follows from that",
    ),
    Decision(
        UNKNOWN,
        "the loss is not finite, and no replay shows why",
        lambda _: True,
        "the loss is {origin.loss} at step {origin.step:d}, and not finite in {many:d} of {run.steps_run:d} "
        "steps{whose}{silently}: the forward pass itself fails",
        {"loss": "origin.loss", "steps": "many", "steps_not_skipped": "taken"},
    ),
)
"""Rows for lost losses that no replay explains."""
