"""The cause of an unhealthy step, and the faults that a healthy one hides, decided by their replays.

The order is that of DIAGNOSES: does the replay reproduce it at all, does FP32 diverge, is FP32 finite, and
only then which FP16 op is the producer and which code its numbers mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Container, Iterator
from dataclasses import replace

from ampdbg.agreement import AGREEMENT, LOST_ENERGY, agrees, is_finite, is_same_run, losses_agree, noise_floor
from ampdbg.diagnosis.divergence import DIVERGENCE, divergence, first_divergence, may_diverge
from ampdbg.diagnosis.oscillation import GROWTH
from ampdbg.diagnosis.producers import (
    FAR_FROM_FP32,
    UNKNOWN,
    Suspect,
    culprit,
    erased_in,
    finding_at,
    format_of,
    named,
    overflow,
    overflow_in,
    precision_cause,
)
from ampdbg.diagnosis.tensors import blamed_in_batch, spoilt_weights, weights_nonfinite
from ampdbg.ops import CHOOSES, base_name
from ampdbg.quantities import listed, number
from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding, Phase
from ampdbg.record.replays import Investigation, Producer, Replay
from ampdbg.record.run import Record, Step, TensorCounts

GREW = 30.0
"""Weights so many times as large as when the run began have been thrown there by single updates; training from scratch
makes them a few times as large."""

WEIGHTS_GREW = "weights_grew"
"""Evidence of a finding that they may be the cause of."""

LARGE = 1e15
"""Some such values, multiplied or squared and summed, are beyond FP32."""

TOO_LARGE = (
    "bring these values down: look for weights, divisors or inputs of that size; no pin helps, since FP32 fails too"
)
OF_OTHERS = "look at what the other ranks have found: their records stand beside this one"
LONGEST_TURN = 32
"""Steps, of all optimizers of a loop, that take turns."""

MAY_DIVERGE = "a learning rate that diverges may be behind it: the losses before it have risen, or are too few to tell"
LEARNING_RATE = "lower the learning rate; where the weights keep their size and it still fails, precision is the cause"
GROWS = (
    "take the largest value off before it grows beyond FP32, as torch.logsumexp and log_softmax do; no pin helps, "
    "since FP32 fails too"
)
OF_SPOILT = "run what computes it with autocast(enabled=False), and compare; the report of ampdbg run may name the op"
STARTS_LOW = (
    "make the loss larger, or start the scaler at a larger scale, as GradScaler(init_scale=2.0**24): by itself it "
    "doubles its scale only every growth_interval steps"
)
HELD_DOWN = (
    "scale the losses apart, a backward pass and a GradScaler for each: at a larger scale other gradients overflow"
)
TOO_COARSE = "change the formula where it divides or cancels; no pin helps, since FP32 fails too"


def nonfinite_loss(record: Record) -> Iterator[Finding]:
    """A loss of inf or NaN, or gradients that nothing withheld from the weights. No calibration explains either.

    Replays decide the cause; without them the code is ``unknown``. Steps that bad weights or a bad batch
    explain are left out.
    """
    spoilt = min((finding.step for finding in (*spoilt_weights(record), *weights_nonfinite(record))), default=math.inf)
    unexplained = (step for step in record.steps if step.step < spoilt and not math.isfinite(step.loss))
    bad = [step for step in unexplained if blamed_in_batch(step, record) is None and not _is_of_scale(step, record)]
    taken = next(_steps_taken_with_bad_gradients(record), None)
    if taken is not None and taken.step <= min((step.step for step in bad), default=taken.step):
        yield cause_of(taken, record)
        return
    if not bad:
        return
    numbers = {step.step for step in bad}
    replayed = [made for made in record.investigations if made.why == "loss" and made.step in numbers]
    telling = [made for made in replayed if not _has_spoilt_weights(made, record)]
    judged = (made for made in telling if not _is_in_doubt(made, record))
    investigated = next(judged, next(iter(telling), None))
    if investigated is not None:
        yield cause_of(investigated, record)
        return
    if replayed:
        yield _spoilt_by_a_step(bad[0], record)
        return
    if record.script is not None and _batch_is_blamed_by(bad[0], record):
        return  # of a script the batch of a step is known only where that was run again
    unskipped = sum(1 for step in bad if not step.skipped)
    lost = len(bad) + record.left_out.lost
    silent = ", and the scaler skipped none of them" if unskipped == len(bad) else ""
    yield finding_of(
        UNKNOWN,
        bad[0].step,
        "forward",
        f"the loss is {number(bad[0].loss)} at step {bad[0].step}, and not finite in {lost} of "
        f"{record.steps_run} steps{silent}: the forward pass itself fails",
        evidence={"loss": bad[0].loss, "steps": lost, "steps_not_skipped": unskipped},
    )


def _batch_is_blamed_by(step: Step, record: Record) -> bool:
    """Whether the batch of an earlier step is to blame, or that of another in the same row of bad losses."""
    bad = {other.step for other in record.steps if not math.isfinite(other.loss)}
    last = next(number for number in itertools.count(step.step) if number + 1 not in bad)
    return any(blamed_in_batch(other, record) is not None for other in record.steps if other.step <= last)


def _is_of_scale(step: Step, record: Record) -> bool:
    """Whether a loss that is made of gradients at the loss scale was lost at one that is too high for it.

    All steps that were taken had a lower one, and one of them came later.
    """
    taken = [other for other in record.steps if not other.skipped and other.scaler == step.scaler]
    is_first_descent = bool(taken) and taken[-1].step > step.step and all(other.scale < step.scale for other in taken)
    return record.scales_gradients and step.skipped and is_first_descent


def _has_spoilt_weights(made: Investigation, record: Record) -> bool:
    """Whether an earlier step has spoilt the weights, and FP32 comes to nothing with them either."""
    return not _is_finite_in_fp32(made) and _spoilt_from(record) < made.step


def _spoilt_from(record: Record) -> float:
    """The first step behind which a parameter was not finite."""
    spoilt = (step.step for step in record.steps for counts in step.nonfinite if _is_spoilt(counts))
    return min(spoilt, default=math.inf)


def _is_spoilt(counts: TensorCounts) -> bool:
    return counts.kind == "parameter" and counts.when == "after"


def _spoilt_by_a_step(bad: Step, record: Record) -> Finding:
    """The finding of a run in which a step has spoilt the weights, and no earlier one was run again."""
    taken = (step for step in record.steps if not step.skipped and (step.found_inf or not math.isfinite(step.loss)))
    origin = min(taken, key=lambda step: step.step, default=bad)
    name = next(counts.name for step in record.steps for counts in step.nonfinite if _is_spoilt(counts))
    what = f"the loss is {number(origin.loss)}" if not math.isfinite(origin.loss) else "gradients are not finite"
    phase: Phase = "forward" if not math.isfinite(origin.loss) else "backward"
    message = f"{what} at step {origin.step}, nothing withheld it, and with it {name} and others became NaN"
    return finding_of(UNKNOWN, origin.step, phase, f"{message}: later steps show no more", parameter=name)


def _steps_taken_with_bad_gradients(record: Record) -> Iterator[Investigation]:
    """Where no scaler looks at the gradients, those that are not finite make the weights so."""
    taken = {step.step: step for step in record.steps if not step.skipped}
    for made in record.investigations:
        if made.why == "gradients" and made.step in taken and blamed_in_batch(taken[made.step], record) is None:
            yield made


def cause_of(made: Investigation, record: Record) -> Finding:
    """The root finding of an investigated step whose loss or gradients are not finite.

    In a script a step is investigated once another has gone wrong: what is found counts from the first of the withheld
    steps in a row, for all have the same weights; a row of an optimizer's own turns is one too. Where the loss is at
    fault, one with a finite loss is none of them.
    """
    found = _of_single_ops(made, record) if made.is_as_it_trained else _of_replays(made, record)
    if made.weights_grew > GREW and CODES[found.code].verdict == "precision":
        found = _grown(found, made)
    # A batch is that of its own step, and a divergence begins where replays show it.
    if record.script is None or found.phase == "data" or found.code == DIVERGENCE:
        return found
    is_of_loss, skipped = made.why == "loss", [step for step in record.steps if step.skipped]
    alike = {step.step for step in skipped if math.isfinite(step.loss) != is_of_loss}
    first = first_in_a_row(found.step, alike)
    first = _first_of_turns(first, alike, record) if is_of_loss else first
    told = first == found.step or made.is_as_it_trained
    message = found.message if told else f"{found.message} (as step {found.step} was run again)"
    return replace(found, step=first, message=message, evidence={**found.evidence, "replayed_step": found.step})


def _grown(found: Finding, made: Investigation) -> Finding:
    """What is said of an op that overflows on weights that have left their size within the run."""
    times = number(made.weights_grew)
    why = f"the weights are {times} times as large as when the run began, which a learning rate that is too large makes"
    doubted = replace(_doubted(found, why), remedy=LEARNING_RATE)
    return replace(doubted, evidence={**found.evidence, WEIGHTS_GREW: made.weights_grew})


def first_in_a_row(last: int, numbers: Container[int]) -> int:
    """The first of the numbers without a gap that end right before ``last``, or ``last`` itself."""
    while last - 1 in numbers:
        last -= 1
    return last


def _first_of_turns(last: int, alike: Collection[int], record: Record) -> int:
    """The first step of an optimizer whose loss is lost at each of its turns, one of which is ``last``: the steps in
    between are of others, which have no scaler or another one, or else it has three turns at least."""
    turn = last - max((step for step in alike if step < last), default=-math.inf)
    if turn > LONGEST_TURN:
        return last
    scalers = {step.step: step.scaler for step in record.steps}
    between = range(last - int(turn) + 1, last)
    are_of_others = all(scalers.get(step, scalers[last]) != scalers[last] for step in between)
    first = last
    while first - int(turn) in alike:
        first -= int(turn)
    return first if are_of_others or first < last - turn else last


def _of_replays(made: Investigation, record: Record) -> Finding:
    if made.reproduced == 0:
        message = f"none of {made.tries} replays reproduced the failure"
        return finding_at(UNKNOWN, made, message, reproduced=made.reproduced, tries=made.tries)
    if made.replays[1].error:
        return finding_at(UNKNOWN, made, f"the same step in FP32 raised an error: {made.replays[1].error}")
    diverging = first_divergence(made, record)
    if diverging is not None:
        return divergence(diverging, record)
    if made.spoilt:
        where = listed([name or "its tensor" for name in made.spoilt])
        message = f"the step is given inf or NaN in {where}, and may have computed that itself: no replay can tell"
        found = finding_at(UNKNOWN, made, message, spoilt_input=list(made.spoilt))
        return replace(found, remedy=OF_SPOILT)
    if not is_finite(made.replays[1]):
        return wrong_in_fp32_too(made)
    suspect = culprit(made)
    if suspect is None:
        low, raised = format_of(made.replays[0].dtype).short, made.replays[0].error
        if raised:
            message = (
                f"the step raises an error in {low} and not in FP32, and no op was found that goes wrong: {raised}"
            )
            return finding_at(UNKNOWN, made, message)
        return finding_at(UNKNOWN, made, f"the step is finite in FP32, and no op was found where {low} goes wrong")
    found = precision_cause(suspect)
    is_in_doubt = found.phase != "data" and _is_in_doubt(made, record)  # no learning rate has made a batch
    return _doubted(found, MAY_DIVERGE) if is_in_doubt else found


def _of_single_ops(made: Investigation, record: Record) -> Finding:
    if made.is_of_others:
        message = f"step {made.step}: all that this process computed is finite, and what it got from another is not"
        return replace(finding_at(UNKNOWN, made, message), remedy=OF_OTHERS)
    diverging = first_divergence(made, record)
    if diverging is not None:
        return divergence(diverging, record)
    suspect = culprit(made)
    if suspect is None or suspect.producer.finite_in_fp32 is None:
        at = suspect.producer if suspect else next(iter(made.replays[0].producers), None)
        if at is None:
            begins = "no op was found that begins it"
        else:
            too = "alone in FP32 it does so too" if at.finite_in_fp32 is False else "what it gives in FP32 is not known"
            begins = f"{named(at)} makes inf or NaN of finite numbers; {too}"
        return finding_at(UNKNOWN, made, f"step {made.step} was traced as it trained, and {begins}", at)
    found = precision_cause(suspect)
    why = ""
    if may_diverge(made, record):
        why = MAY_DIVERGE
    elif made.why == "gradients" and all(step.skipped for step in record.steps):
        why = "no loss scale has worked yet, and a longer run shows whether a lower one does"
    if why:
        return _doubted(found, why)
    told = replace(found, message=f"{found.message} (this op alone, on the inputs that it had at step {made.step})")
    spoilt = {"spoilt_input": list(made.spoilt)} if made.spoilt else {}
    return replace(told, evidence={**found.evidence, **spoilt})


def _is_in_doubt(made: Investigation, record: Record) -> bool:
    """Whether FP32 comes through what modules gave in the step, and a learning rate that diverges may be behind it."""
    return not made.has_loss and _is_finite_in_fp32(made) and may_diverge(made, record)


def _is_finite_in_fp32(made: Investigation) -> bool:
    return len(made.replays) > 1 and is_finite(made.replays[1])


def _doubted(found: Finding, why: str) -> Finding:
    return replace(found, code=UNKNOWN, message=f"{found.message}; {why}", remedy=CODES[UNKNOWN].remedy)


def wrong_in_fp32_too(made: Investigation) -> Finding:
    """The finding of a step that is not finite in FP32: FP64 decides whether its mathematics is."""
    producer = _starts_in(made)
    where = f", first in {named(producer)}" if producer else ""
    fp64 = next((replay for replay in made.replays if replay.dtype == "float64"), None)
    if fp64 is None or fp64.error or is_finite(fp64):
        return _beyond_fp32(made, producer, where, fp64.error if fp64 else "")
    if fp64.loss == math.inf and made.replays[1].loss == math.inf:
        # torch's CTC loss has one value a sample, before any mean.
        unit = "samples" if producer and "ctc_loss" in producer.op else "values"
        share = f": {producer.inf} of {producer.size} {unit}" if producer else ""
        message = f"the loss is infinite in FP32 and FP64 too{where}{share}"
        return finding_at("infinite-loss", made, message, producer)
    return finding_at("true-nan", made, f"the step is not finite in FP32 and FP64 either{where}", producer)


def _beyond_fp32(made: Investigation, producer: Producer | None, where: str, error: str) -> Finding:
    """The finding of a step that FP32 does not come through either, though its mathematics may: no pin helps."""
    largest = producer.input_largest if producer and producer.input_largest > LARGE else None
    of = f" on values of up to {number(largest)}" if largest else ""
    low = format_of(made.replays[0].dtype).short
    overflows = producer is not None and producer.inf > 0 and not (producer.nan or producer.divides_by_zero)
    is_beyond = largest is not None or overflows
    limit = (
        f"its values exceed FP32's range, not only {low}'s"
        if is_beyond
        else f"FP32 rounds too coarsely, not only {low}"
    )
    why = f"FP64 raised an error: {error}" if error else f"it is finite in FP64: {limit}"
    message = f"the step is not finite in FP32 either{where}{of}; {why}"
    found = finding_at(UNKNOWN, made, message, producer, finite_in_fp32=False, largest=largest)
    return replace(found, remedy=TOO_LARGE if largest else GROWS if is_beyond else TOO_COARSE)


def _starts_in(made: Investigation) -> Producer | None:
    """Where FP32 goes wrong: an op that makes a NaN of finite numbers is wrong for certain, an inf may be meant."""
    phases = ("forward",) if made.why == "loss" else ("backward",)
    found = [producer for producer in made.replays[1].producers if producer.phase in phases]
    return next((producer for producer in found if producer.nan), next(iter(found), None))


# Faults behind a finite loss and finite gradients: overflow that erases itself, lost gradients, lost precision


def hidden_faults(record: Record) -> Iterator[Finding]:
    """What the last step of a run that looks healthy hides."""
    for made in record.investigations:
        if made.why == "end" and _can_be_judged(made):
            yield from _faults(made, record)


def _can_be_judged(made: Investigation) -> bool:
    """Code that does not compute the same again cannot be compared with FP32."""
    return len(made.replays) > 1 and is_finite(made.replays[0]) and is_finite(made.replays[1]) and is_same_run(made)


def _faults(made: Investigation, record: Record) -> Iterator[Finding]:
    low, fp32, floor = made.replays[0], made.replays[1], noise_floor(made)
    # Without its noise floor a difference says nothing.
    is_far = floor is not None and not agrees(low, fp32, floor)
    hidden, erased = overflow_in(made), erased_in(made)
    if hidden is not None:
        yield _silent_overflow(hidden, is_far)
    elif erased is not None:
        yield _erased_overflow(erased)
    if (low.lost_energy or 0.0) > LOST_ENERGY or (is_far and hidden is None and low.lost):
        yield _underflow(made, record)
    elif is_far and hidden is None and not _chooses_otherwise(made, floor):
        yield _precision_loss(made)


def _silent_overflow(suspect: Suspect, is_far: bool) -> Finding:
    low, fp32 = suspect.made.replays[:2]
    if not is_far and suspect.producer.phase == "backward" and _agree(low):
        return _erased_overflow(suspect)
    result = _losses(low, fp32) if is_far else "the loss still agrees with FP32's"
    message = f"{overflow(suspect)}, and a later op turns the inf into a finite value; {result}"
    evidence = {"value": suspect.value, **_against_fp32(low, fp32)}
    found = finding_at("silent-overflow", suspect.made, message, suspect.producer, **evidence)
    return found if is_far else replace(found, severity="warning")


def _agree(low: Replay) -> bool:
    return low.gradient_distance is not None and low.gradient_distance <= AGREEMENT


def _erased_overflow(suspect: Suspect) -> Finding:
    """A gradient overflowed where FP32 makes a zero of it too, as behind a ReLU."""
    message = f"{overflow(suspect)}, and a later op turns the inf into a zero, as it does in FP32"
    evidence = {"value": suspect.value, **_against_fp32(*suspect.made.replays[:2])}
    found = finding_at("silent-overflow", suspect.made, message, suspect.producer, **evidence)
    return replace(found, severity="info", remedy="")


def _underflow(made: Investigation, record: Record) -> Finding:
    low = made.replays[0]
    flushes = f"{format_of(low.dtype).short} flushes {low.lost_energy or 0.0:.0%} of the gradient's energy to zero"
    message = f"at a loss scale of {number(low.scale)}, {flushes}"
    lost = low.lost[:20]
    found = finding_at(
        "gradient-underflow", made, message, loss_scale=low.scale, lost_energy=low.lost_energy, lost=lost
    )
    if has_static_scale(record) or not any(step.scaler for step in record.steps):
        return found
    # The scaler is a dynamic one: what keeps its scale down is another gradient, or that it began there.
    skipped = (step for step in record.steps if step.skipped and step.scaler and math.isfinite(step.loss))
    is_held = any(low.scale < step.scale <= GROWTH * low.scale for step in skipped)
    return replace(found, remedy=HELD_DOWN if is_held else STARTS_LOW)


def has_static_scale(record: Record) -> bool:
    """Whether the config gives the loss scale as a number, which nothing changes."""
    return isinstance(record.config.get("precision", {}).get("loss_scale"), (int, float))


def _chooses_otherwise(made: Investigation, floor: Replay | None) -> bool:
    """Whether a choice alone is far from FP32's, such as which box an object is matched to, and the loss agrees."""
    first = made.first_far
    return (
        first is not None and base_name(first.op) in CHOOSES and losses_agree(made.replays[0], made.replays[1], floor)
    )


def _precision_loss(made: Investigation) -> Finding:
    low, fp32 = made.replays[:2]
    where = f"; {named(made.first_far)} is the first op that differs" if made.first_far else ""
    message = f"the step differs from FP32 by more than rounding explains: {_losses(low, fp32)}{where}"
    return finding_at(FAR_FROM_FP32, made, message, made.first_far, **_against_fp32(low, fp32))


def _losses(low: Replay, fp32: Replay) -> str:
    return f"the loss is {number(low.loss)}, and {number(fp32.loss)} in FP32"


def _against_fp32(low: Replay, fp32: Replay) -> dict[str, object]:
    return {"loss": low.loss, "loss_in_fp32": fp32.loss, "gradient_distance": low.gradient_distance}
