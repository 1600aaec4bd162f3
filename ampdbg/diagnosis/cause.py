"""The cause of an unhealthy step, decided by its replays.

The order is that of DIAGNOSES: does the replay reproduce it at all, does FP32 diverge, is FP32 finite, and
only then which FP16 op is the producer and which code its numbers mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile

from ampdbg.agreement import is_finite, is_same_run
from ampdbg.diagnosis.producers import (
    OVERFLOWS,
    UNKNOWN,
    culprit,
    finding_at,
    format_of,
    named,
    op_name,
    precision_cause,
    survivor,
)
from ampdbg.diagnosis.tensors import blamed_in_batch, spoilt_weights, weights_nonfinite
from ampdbg.levels import has_static_scale
from ampdbg.quantities import number
from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding, Phase
from ampdbg.record.run import Investigation, Producer, Record, Replay, Step, TensorCounts

GREW = 30.0
"""Weights so many times as large as when the run began have been thrown there by single updates; training from scratch
makes them a few times as large."""

GREW_IN_A_LEAP = 2.0
"""As many times, where the loss has leapt in FP32 too."""

WEIGHTS_GREW = "weights_grew"
"""Evidence of a finding that they may be the cause of."""

LARGE = 1e15
"""Some such values, multiplied or squared and summed, are beyond FP32."""

TOO_LARGE = (
    "bring these values down: look for weights, divisors or inputs of that size; no pin helps, since FP32 fails too"
)
CALIBRATION, NO_USABLE_SCALE = "scale-calibration", "no-usable-scale"

SKIPS_IN_A_ROW = 5
"""So many skipped steps in a row are no calibration: healthy models settle within four halvings of 65536."""

KEPT_SCALE = "kept_scale"
"""The evidence of a loss scale that nothing lowers."""

OF_OTHERS = "look at what the other ranks have found: their records stand beside this one"
MAY_DIVERGE = "a learning rate that diverges may be behind it: the losses before it have risen, or are too few to tell"
LEARNING_RATE = "lower the learning rate; where the weights keep their size and it still fails, precision is the cause"
GROWS = (
    "take the largest value off before it grows beyond FP32, as torch.logsumexp and log_softmax do; no pin helps, "
    "since FP32 fails too"
)
TOO_COARSE = "change the formula where it divides or cancels; no pin helps, since FP32 fails too"


def nonfinite_loss(record: Record) -> Iterator[Finding]:
    """A loss of inf or NaN, or gradients that nothing withheld from the weights. No calibration explains either.

    Replays decide the cause; without them the code is ``unknown``. Steps that bad weights or a bad batch
    explain are left out. Of several optimizers the first that shows it counts: NaN goes from one to the others.
    """
    found = [finding for timeline in record.timelines for finding in _lost(timeline, record)]
    yield from sorted(found, key=lambda finding: finding.step)[:1]


def _lost(timeline: Record, record: Record) -> Iterator[Finding]:
    spoilt = min((finding.step for finding in (*spoilt_weights(record), *weights_nonfinite(record))), default=math.inf)
    unexplained = (step for step in timeline.steps if step.step < spoilt and not math.isfinite(step.loss))
    bad = [step for step in unexplained if blamed_in_batch(step, record) is None and not _is_of_scale(step, timeline)]
    taken = next(_steps_taken_with_bad_gradients(timeline), None)
    if taken is not None and taken.step <= min((step.step for step in bad), default=taken.step):
        yield cause_of(taken, timeline)
        return
    if not bad:
        return
    numbers = {step.step for step in bad}
    replayed = [made for made in timeline.investigations if made.why == "loss" and made.step in numbers]
    telling = [made for made in replayed if not _has_spoilt_weights(made, record)]
    judged = (made for made in telling if not _is_in_doubt(made, timeline))
    investigated = next(judged, next(iter(telling), None))
    if investigated is not None:
        yield cause_of(investigated, timeline)
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
        f"{timeline.steps_run} steps{silent}: the forward pass itself fails",
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
    taken = [other for other in record.steps if not other.skipped]
    is_first_descent = bool(taken) and taken[-1].step > step.step and all(other.scale < step.scale for other in taken)
    return record.scales_gradients and step.skipped and is_first_descent


def _has_spoilt_weights(made: Investigation, record: Record) -> bool:
    """Whether an earlier step has spoilt the weights, and FP32 comes to nothing with them either."""
    spoilt = (step.step for step in record.steps for counts in step.nonfinite if _is_spoilt(counts))
    return not is_finite(made.fp32) and min(spoilt, default=math.inf) < made.step


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
    steps in a row of its optimizer, for all have the same weights. Where the loss is at fault, one with a finite loss
    is none of them.
    """
    found = _of_the_scale(_of_replays(made, record), made, record)
    if CODES[found.code].verdict == "precision":
        found = _grown(found, made, record)
    # A batch is that of its own step, and a divergence begins where replays show it.
    if record.script is None or found.phase == "data" or found.code == DIVERGENCE:
        return found
    is_of_loss, skipped = made.why == "loss", [step for step in record.steps if step.skipped]
    alike = {step.step for step in skipped if math.isfinite(step.loss) != is_of_loss}
    first = first_in_a_row(found.step, alike, record, failing_elsewhere(made, record))
    told = first == found.step
    message = found.message if told else f"{found.message} (as step {found.step} was run again)"
    return replace(found, step=first, message=message, evidence={**found.evidence, "replayed_step": found.step})


def failing_elsewhere(made: Investigation, timeline: Record) -> set[int]:
    """The steps whose replays have shown that they go wrong in another place, as while a loss scale settles.

    Of two optimizers that step before one update the replay of one has not the loss of the step, and tells nothing.
    """
    here = next(iter(made.low.producers), None)
    losses = {step.step: step.loss for step in timeline.steps}
    replayed = (other for other in timeline.investigations if other.reproduced)
    whole = (other for other in replayed if is_same_run(replace(other, loss=losses.get(other.step, math.nan))))
    begins = {other.step: other.low.producers[0].site for other in whole if other.low.producers}
    return {step for step, site in begins.items() if here is not None and step != made.step and site != here.site}


def _of_the_scale(found: Finding, made: Investigation, record: Record) -> Finding:
    """The finding of gradients that a lower loss scale would do for: the scale, where nothing lowers it, and where it
    would lose part of them ``no-usable-scale``."""
    survived, given = survivor(made), number(made.low.scale)
    if survived is None:
        return found
    kept = _kept_scale(made, record)
    if not survived.lost and CODES[found.code].keeps_scale and kept is not None:
        what, cure, scale = kept
        return replace(
            found,
            code=CALIBRATION,
            evidence={**found.evidence, KEPT_SCALE: scale},
            message=f"{what} is too large for this step's gradients: {found.message}",
            remedy=f"{cure.format(survived.scale)}, which finds the right one by itself; no pin is needed",
        )
    if survived.lost and found.code == OVERFLOWS["backward"]:
        return replace(
            found,
            code=NO_USABLE_SCALE,
            message=f"{op_name(found.op)} overflows at a loss scale of {given}; at {number(survived.scale)} it does "
            f"not, but there half precision flushes the gradient of {', '.join(survived.lost[:3])} to zero",
            remedy=CODES[NO_USABLE_SCALE].remedy,
            evidence={**found.evidence, "lost": list(survived.lost[:20])},
        )
    return found


def _kept_scale(made: Investigation, record: Record) -> tuple[str, str, float] | None:
    """A loss scale that nothing lowers, in words, with what to do about it, and itself: of the config, of the script's
    own, or with a floor; None of a dynamic one."""
    floor = scale_floor(record.steps)
    if floor is not None:
        return f"the loss scale, which falls no lower than {number(floor)},", "let GradScaler lower the scale", floor
    is_of_script = made.low.scale > 1.0 and record.script is not None and not any(step.scaler for step in record.steps)
    if not is_of_script and not has_static_scale(record.config):
        return None
    whose = "the script's own" if is_of_script else "the static"
    return f"{whose} loss scale {number(made.low.scale)}", "use a loss scale of {:g}, or a dynamic one", made.low.scale


def scale_floor(steps: Sequence[Step]) -> float | None:
    """The loss scale that a scaler does not leave though it skips every step, as one with a floor of its own; else
    None."""
    last = steps[-SKIPS_IN_A_ROW:]
    is_stuck = len(last) == SKIPS_IN_A_ROW and len({(step.scaler, step.scale) for step in last}) == 1
    is_of_scaler = is_stuck and all(step.skipped and step.scaler for step in last)
    return last[-1].scale if is_of_scaler and last[-1].scale > 1.0 else None


def _grown(found: Finding, made: Investigation, record: Record) -> Finding:
    """What is said of an op that overflows; on weights that have left their size within the run it is doubted."""
    leap = leap_in_fp32(made, record) if made.weights_grew > GREW_IN_A_LEAP else ""
    if not leap and made.weights_grew <= GREW:
        return found
    size = f"the weights are {number(made.weights_grew)} times as large as when the run began"
    why = f"{size}{leap}, which a learning rate that is too large makes"
    doubted = replace(_doubted(found, why), remedy=LEARNING_RATE)
    return replace(doubted, evidence={**found.evidence, WEIGHTS_GREW: made.weights_grew})


def _of_replays(made: Investigation, record: Record) -> Finding:
    fp32 = made.fp32
    if made.is_of_others:
        message = f"step {made.step}: all that this process computed is finite, and what it got from another is not"
        return replace(finding_at(UNKNOWN, made, message), remedy=OF_OTHERS)
    if made.reproduced == 0 or fp32 is None:
        message = f"none of {made.tries} replays reproduced the failure"
        return finding_at(UNKNOWN, made, message, reproduced=made.reproduced, tries=made.tries)
    if fp32.error:
        return finding_at(UNKNOWN, made, f"the same step in FP32 raised an error: {fp32.error}")
    diverging = first_divergence(made, record)
    if diverging is not None and not (diverging is made and _is_of_its_batch(made, record)):
        return divergence(diverging, record)
    if not is_finite(fp32):
        return _wrong_in_fp32_too(made, fp32)
    suspect = culprit(made)
    if suspect is None:
        low, raised = format_of(made.low.dtype).short, made.low.error
        if raised:
            message = (
                f"the step raises an error in {low} and not in FP32, and no op was found that goes wrong: {raised}"
            )
            return finding_at(UNKNOWN, made, message)
        return finding_at(UNKNOWN, made, f"the step is finite in FP32, and no op was found where {low} goes wrong")
    found = precision_cause(suspect)
    is_in_doubt = found.phase != "data" and _is_in_doubt(made, record)  # no learning rate has made a batch
    return _doubted(found, MAY_DIVERGE) if is_in_doubt else found


def _is_of_its_batch(made: Investigation, record: Record) -> bool:
    """Whether the batch holds what half cannot, where nothing had diverged before: FP32, which goes on with this very
    batch, climbs because of it."""
    suspect = culprit(made)
    return suspect is not None and suspect.leaf is not None and not had_diverged(made, record)


def _is_in_doubt(made: Investigation, record: Record) -> bool:
    """Whether FP32 comes through what modules gave in the step, and a learning rate that diverges may be behind it."""
    return made.reach == "modules" and is_finite(made.fp32) and may_diverge(made, record)


def _doubted(found: Finding, why: str) -> Finding:
    return replace(found, code=UNKNOWN, message=f"{found.message}; {why}", remedy=CODES[UNKNOWN].remedy)


def _wrong_in_fp32_too(made: Investigation, fp32: Replay) -> Finding:
    """The finding of a step that is not finite in FP32: FP64 decides whether its mathematics is."""
    producer = _starts_in(fp32, made.why)
    where = f", first in {named(producer)}" if producer else ""
    if producer and producer.phase == "forward" and producer.reaches_gradients:
        where += ", which the loss leaves out and the gradients do not"
    fp64 = made.wide
    if fp64 is None or fp64.error or is_finite(fp64):
        return _beyond_fp32(made, producer, where, fp64.error if fp64 else "")
    if fp64.loss == fp32.loss == math.inf:
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
    low = format_of(made.low.dtype).short
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


def _starts_in(fp32: Replay, why: str) -> Producer | None:
    """Where FP32 goes wrong: an op that makes a NaN of finite numbers is wrong for certain, an inf may be meant.

    Of gradients that is what has reached them, from either pass, where that is known.
    """
    phase = "forward" if why == "loss" else "backward"
    reaching = [producer for producer in fp32.producers if producer.reaches_gradients and why == "gradients"]
    found = reaching or [producer for producer in fp32.producers if producer.phase == phase]
    return next((producer for producer in found if producer.nan), next(iter(found), None))


# Runs that diverge by themselves, in FP32 too: when losses rise, and the finding that says so

DIVERGENCE = "divergence"

DIVERGED = 10.0
"""Losses that climb so many times further than they have ranged before diverge; noise and hard batches do not."""

FEW_LOSSES = 5
"""Fewer losses say little of how far they range: then their size counts as well."""

LEAPT = 1000.0
"""Losses so many times the first one have left it for good, though one loss says nothing of how far they range."""

KEPT_SIZE = 1.05
"""Weights that have grown by less are where they began: so few steps have not thrown them away."""

RISEN = 100.0
"""Losses so many times all before them are told of in a run that is healthy otherwise."""

RISEN_NOTE = (
    "the loss rose from {} to {} and stays up, with nothing beyond a limit: look at the learning rate, and compare "
    "with a run in FP32"
)

RESOLUTION = 1e-6
"""A smaller share of a loss is rounding."""


def first_divergence(made: Investigation, record: Record) -> Investigation | None:
    """The first step whose replays show that the run diverges, if ``made`` shows it or was not replayed; else None."""
    own = made if _diverges(made, record) else None
    if own is None:
        return None
    earlier = (other for other in record.investigations if other.step < made.step and was_replayed(other))
    return min((other for other in earlier if _diverges(other, record)), key=lambda other: other.step, default=own)


def divergence(made: Investigation, record: Record) -> Finding:
    """The finding of a run that diverges."""
    before, climb = _before(made, record), made.continuation
    if climb and all(step.skipped for step in before):  # all with the same weights: other losses are other batches'
        message = f"the loss is {number(climb[0])}, and steps in FP32 on the same batch lead to {number(climb[-1])}"
    else:
        losses = [step.loss for step in before if math.isfinite(step.loss)]
        reached = max(loss for loss in (losses[-1], _loss_in_fp32(made)) if math.isfinite(loss))
        rose_from = f"the loss rose from {number(min(losses))} to {number(reached)}"
        message = f"{rose_from}, and further steps in FP32 go on rising"
    return finding_at(DIVERGENCE, made, message, continuation=list(climb))


def rose(losses: Sequence[float], times: float = DIVERGED) -> bool:
    """Whether from some step on all losses stand above all before it, by more than ``times`` what those range over.

    A constant added to all of them changes nothing and neither does a positive factor: losses may be negative.
    Equal losses do not rise, nor do easy and hard batches that take turns. Two losses are too few to tell.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    highest, lowest = list(accumulate(finite, max)), list(accumulate(finite, min))
    lowest_after = list(accumulate(reversed(finite), min))[::-1]
    return any(
        lowest_after[start] - highest[start - 1]
        > max(times * (highest[start - 1] - lowest[start - 1]), RESOLUTION * abs(highest[start - 1]))
        for start in range(2, len(finite))
    )


def may_have_risen(before: Sequence[float], now: float) -> bool:
    """Whether the last loss, or the one of ``now``, is above where the run began: else nothing can have diverged."""
    finite = [loss for loss in before if math.isfinite(loss)]
    return bool(finite) and any(math.isfinite(loss) and loss > finite[0] for loss in (finite[-1], now))


def climbs_on(before: Sequence[float], continuation: Sequence[float]) -> bool:
    """Whether steps in FP32 on one batch, after the losses ``before`` them, climb by themselves and diverge.

    They have to climb steadily, or at once to quite another level, and further than the losses have ever ranged; much
    further, where those had not risen yet. A continuation that ends in inf or NaN diverges if it does not fall and
    stands clear of them.
    """
    earlier = [loss for loss in before if math.isfinite(loss)]
    finite = [loss for loss in continuation if math.isfinite(loss)]
    if not earlier or not finite:
        return False
    climb = finite[-1] - finite[0]
    if len(finite) < len(continuation):
        return climb >= 0 and (rose([*earlier, *finite]) or _leapt([*earlier, *finite]))
    ranged = max(earlier) - min(earlier)
    if len(earlier) < FEW_LOSSES:
        ranged = max(ranged, *map(abs, earlier))
    times = 1.0 if rose(earlier, times=1.0) else DIVERGED
    climbs = rose(finite, times=1.0) or rose([min(earlier), *finite])
    return climbs and climb > times * ranged


def _leapt(losses: Sequence[float]) -> bool:
    first, *later = losses
    return bool(later and first) and min(later) > LEAPT * abs(first)


def risen(losses: Sequence[float]) -> str:
    """A note of a run without a fault whose losses stand, from some step on, far above the size of all before them;
    "" of others. Some losses are meant to grow, so that it is no more."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    highest = list(accumulate(map(abs, finite), max))
    lowest_after = list(accumulate(reversed(finite), min))[::-1]
    starts = range(2, len(finite) - 1)
    start = next((start for start in starts if lowest_after[start] > RISEN * highest[start - 1]), None)
    return "" if start is None else RISEN_NOTE.format(number(finite[start - 1]), number(finite[-1]))


def _before(made: Investigation, record: Record) -> list[Step]:
    return [step for step in record.steps if step.step < made.step]


def _diverges(made: Investigation, record: Record) -> bool:
    """Whether FP32 climbs by itself from this step on; where it is not even finite here, whether the loss had risen."""
    before = [step.loss for step in _before(made, record)]
    return climbs_on(before, made.continuation) or (not is_finite(made.fp32) and rose(before))


def may_diverge(made: Investigation, record: Record) -> bool:
    """Whether what overflows in a step that no replay judges may come of the learning rate: the losses before it had
    risen, or are too few to tell though weights were written since the first and may have lost their size."""
    earlier = _before(made, record)
    before = [step.loss for step in earlier if math.isfinite(step.loss)]
    if all(step.skipped for step in earlier) or not before:
        return False
    has_kept_size = made.weights_grew != 1.0 and made.weights_grew < KEPT_SIZE  # it is 1 where nobody knows
    are_few = len(before) < FEW_LOSSES and not has_kept_size
    return are_few or before[-1] > max(before[:FEW_LOSSES]) or rose(before) or _leapt(before)


def had_diverged(made: Investigation, record: Record) -> bool:
    """Whether the losses before a step had risen, or the weights had left their size."""
    before = [step.loss for step in _before(made, record) if math.isfinite(step.loss)]
    return made.weights_grew >= KEPT_SIZE or rose(before) or _leapt(before)


def leap_in_fp32(made: Investigation, record: Record) -> str:
    """That in FP32 too the loss has left all earlier ones for good, to be said behind what has made it; "" if not."""
    skipped = {step.step for step in record.steps if step.skipped}
    first = first_in_a_row(made.step, skipped, record)
    pairs = pairwise(step for step in record.steps if step.step >= first)
    of_same_weights = {first, *(now.step for _, now in takewhile(lambda pair: pair[0].skipped, pairs))}
    before = [abs(step.loss) for step in _before(made, record) if step.step < first and math.isfinite(step.loss)]
    # Of a step whose modules alone were run again no losses are known; those of another on the same weights may be.
    told = next((one for one in record.investigations if one.continuation and one.step in of_same_weights), None)
    if not before or told is None:
        return ""
    now = _loss_in_fp32(told)
    comes_back = now <= LEAPT * max(before) or any(loss <= DIVERGED * max(before) for loss in told.continuation)
    return "" if comes_back else f", and in FP32 too the loss leaps from {number(before[-1])} to {number(now)}"


def first_in_a_row(last: int, numbers: Container[int], timeline: Record, elsewhere: Container[int] = ()) -> int:
    """The first of the steps with these numbers that end, without a gap, right before ``last``; or ``last`` itself, as
    where one of them fails ``elsewhere``: of those between nobody knows where they do."""
    of_iteration = {step.iteration: step.step for step in timeline.steps}
    iteration = next((at for at, step in of_iteration.items() if step == last), last)
    while of_iteration.get(iteration - 1) in numbers:
        iteration -= 1
        if of_iteration[iteration] in elsewhere:
            return last
    return of_iteration.get(iteration, last)


def was_replayed(made: Investigation) -> bool:
    """Whether the step went wrong again, and FP32 has shown what it comes to."""
    return made.reproduced > 0 and made.fp32 is not None and not made.fp32.error


def _loss_in_fp32(made: Investigation) -> float:
    return math.nan if made.fp32 is None else made.fp32.loss
