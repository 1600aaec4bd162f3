"""Findings about what was bad before or after a step: the batch, the weights and their updates, the buffers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.producers import suspects
from ampdbg.quantities import counted, listed, number
from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import FrozenParameter, Investigation, Producer, Record, Step, TensorCounts

WEIGHTS, SMALL_UPDATES, FROZEN = "weights-nonfinite", "optimizer-underflow", "frozen-weights"
DATA = "data-nonfinite"

POISONED = "buffer-poisoned"

NORM_STATISTICS = ("running_mean", "running_var")
"""The buffers of torch's norms, and what others call theirs of the same kind."""

FALLS = 0.9
"""A loss whose mean falls below this share of what it was at first is said to fall."""

MOST_OF_THE_UPDATE = 0.5
"""Where a larger share of the updates' sum of squares moves no weight, training stands still."""

LARGER_EPS = ", or use an eps that half holds: eps=1e-6 (it changes the updates slightly)"


def data_nonfinite(record: Record) -> Iterator[Finding]:
    """``data-nonfinite``: the first batch whose inf or NaN made its step fail.

    Masks of -inf and NaN for missing values are common in batches: what a healthy step holds too, or what
    FP32 comes through, is meant.
    """
    for step in record.steps:
        bad = blamed_in_batch(step, record)
        if bad is not None:
            sample = f", first in sample {bad.first_index[0]}" if bad.first_index else ""
            yield finding_of(
                DATA,
                step.step,
                "data",
                f"the batch of step {step.step} holds {counted_values(bad)} in {bad.name or 'its tensor'}{sample}",
                evidence=_evidence(bad),
            )
            return


def blamed_in_batch(step: Step, record: Record) -> TensorCounts | None:
    """The leaf of the step's batch whose inf or NaN made it fail; None where there is none."""
    bad = [counts for counts in step.nonfinite if counts.kind == "batch"]
    if not bad or _is_healthy(step) or _finite_in_fp32(record, step):
        return None
    meant = {
        (counts.name, counts.nan > 0)
        for other in record.steps
        if _is_healthy(other)
        for counts in other.nonfinite
        if counts.kind == "batch"
    }
    return next((counts for counts in bad if (counts.name, counts.nan > 0) not in meant), None)


def weights_nonfinite(record: Record) -> Iterator[Finding]:
    """``weights-nonfinite``: parameters or buffers that were bad before a forward pass.

    A buffer of -inf, or a frozen parameter, is mostly a mask: FP32 decides, or a healthy step that had it too. NaN in
    weights that hurt no step is a warning.
    """
    last_healthy = max((step.step for step in record.steps if _is_healthy(step)), default=-1)
    for step in record.steps:
        bad = [counts for counts in step.nonfinite if _was_bad_before(counts, step)]
        if step.step <= last_healthy or _finite_in_fp32(record, step):
            bad = [counts for counts in bad if counts.nan or (counts.kind == "parameter" and not counts.frozen)]
        if bad:
            yield finding_of(
                WEIGHTS,
                step.step,
                "forward",
                f"{bad[0].kind} {bad[0].name} holds {counted_values(bad[0])} before the forward pass of step "
                f"{step.step}" + (f", and so do {len(bad) - 1} more" if len(bad) > 1 else ""),
                severity="error" if not all(map(_is_healthy, record.steps)) else "warning",
                parameter=bad[0].name,
                remedy=CODES[WEIGHTS].remedy
                if step.step == 0
                else f"look at step {step.step - 1}, whose update wrote them",
                evidence=_evidence(bad[0]),
            )
            return


def spoilt_weights(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: an update of half weights that is not finite, where FP32's is."""
    seen = record.half_updates
    if seen is None or seen.spoilt_step is None or not seen.spoilt:
        return
    why = f": eps={seen.vanishing_eps:g} is 0 in half" if seen.vanishing_eps else ""
    yield finding_of(
        SMALL_UPDATES,
        seen.spoilt_step,
        "optimizer",
        f"the update of step {seen.spoilt_step} makes {_named(seen.spoilt)} non-finite although all "
        f"gradients are finite, and so is the same update in FP32{why}",
        parameter=seen.spoilt[0],
        remedy=CODES[SMALL_UPDATES].remedy + (LARGER_EPS if seen.vanishing_eps else ""),
        evidence={"parameters": list(seen.spoilt[:20]), "eps": seen.vanishing_eps},
    )


def lost_updates(record: Record) -> Iterator[Finding]:
    """``optimizer-underflow``: updates so small that half weights round back to where they were."""
    seen = record.half_updates
    if seen is None or not seen.lost or (seen.lost_energy or 0.0) <= MOST_OF_THE_UPDATE:
        return
    yield finding_of(
        SMALL_UPDATES,
        record.steps[0].step,
        "optimizer",
        f"{seen.steps} steps lose {seen.lost_energy:.0%} of the updates' energy, most of it in "
        f"{_named(seen.lost)}: "
        "half weights cannot move by less than half a unit in their last place",
        parameter=seen.lost[0],
        evidence={"parameters": list(seen.lost[:20]), "lost_energy": seen.lost_energy},
    )


def frozen_weights(record: Record) -> Iterator[Finding]:
    """``frozen-weights``: bfloat16 weights that stay where they are, step after step."""
    seen = record.half_updates
    if seen is None or not seen.frozen:
        return
    worst = sorted(seen.frozen, key=lambda one: (-one.still, -one.unmoved))
    many = f"in {counted(seen.steps, 'step')} {counted(len(worst), 'bfloat16 parameter')} lose most of their updates"
    parts = {"gradient's part": seen.lost_gradient, "weight decay": seen.lost_decay}
    apart = listed([f"{value:.0%} of the {what}" for what, value in parts.items() if value is not None])
    lost = f"{seen.lost_energy or 0.0:.0%} of all updates' energy is lost{f' ({apart})' if apart else ''}"
    yield finding_of(
        FROZEN,
        record.steps[0].step,
        "optimizer",
        f"{many}, first of all {_still(worst[0], seen.steps)}; {lost}{_falls(record.steps)}",
        severity="warning",
        parameter=worst[0].name,
        evidence={
            "parameters": [one.name for one in worst[:20]],
            "lost_energy": seen.lost_energy,
            "lost_gradient": seen.lost_gradient,
            "lost_decay": seen.lost_decay,
        },
    )


def _still(one: FrozenParameter, steps: int) -> str:
    if one.still == steps:
        return f"{one.name}, of which no entry ever moves"
    return f"{one.name}, of which {one.unmoved:.0%} of the entries stay where they are in a step"


def _falls(steps: Sequence[Step]) -> str:
    """What speaks for a run that goes on learning with the weights that do move."""
    tenth = len(steps) // 10 or 1
    first, last = (statistics.fmean(step.loss for step in some) for some in (steps[:tenth], steps[-tenth:]))
    return f"; the loss falls from {number(first)} to {number(last)} all the same" if last < FALLS * first else ""


def buffer_poisoned(record: Record) -> Iterator[Finding]:
    """``buffer-poisoned``: a buffer that was finite before a step and is not after it, and is finite in FP32.

    A script may write inf into a buffer of its own, such as the best loss so far: where no loss was lost, and no op is
    known, it is information. Only what overflows writes inf into the statistics of a norm.
    """
    meant: Finding | None = None
    for step in record.steps:
        bad = [
            counts
            for counts in step.nonfinite
            if counts.kind == "buffer" and counts.when == "after" and not _is_meant(counts, record)
        ]
        at = _poisoned_by(step, record) if bad else None
        is_shown = at is not None or not math.isfinite(step.loss)
        spoilt = [counts for counts in bad if is_shown or counts.name.rpartition(".")[2] in NORM_STATISTICS]
        if spoilt:
            yield _poisoned(step, spoilt[0], at) if is_shown else _poisoned_before(step, spoilt[0])
            return
        if bad and meant is None:
            meant = _perhaps_meant(step, bad[0])
    if meant is not None:
        yield meant


def _poisoned(step: Step, bad: TensorCounts, at: Producer | None) -> Finding:
    what = "and stays so: skipping a step does not restore buffers, and evaluation will use this one"
    # Only a buffer that FP32 keeps finite has an op.
    shown = {"op": at.op, "source": at.source, "evidence": {**_evidence(bad), "finite_in_fp32": True}} if at else {}
    return _of_buffer(step, bad, f" {what}", **shown)


def _poisoned_before(step: Step, bad: TensorCounts) -> Finding:
    """What is found at the end of a run, or behind a step that looks at buffers for another reason: buffers are looked
    at in no healthy step, and a script may give up a pass."""
    what = (
        ", whose own loss is finite: what overflows or is given inf or NaN in another pass, also in one whose loss is "
        "not used, may have written it"
    )
    remedy = "look for inf and NaN in what the model is given, and for what overflows, then reset the buffer"
    return _of_buffer(step, bad, what, remedy=remedy)


def _perhaps_meant(step: Step, bad: TensorCounts) -> Finding:
    """What no loss shows may be the script's own doing."""
    what = (
        ", though the loss of that step is finite: the script may write that itself, or an op that leads to no loss "
        "overflows"
    )
    return _of_buffer(step, bad, what, severity="info", remedy="")


def _of_buffer(step: Step, bad: TensorCounts, what: str, **fields: Any) -> Finding:
    message = f"buffer {bad.name} holds {counted_values(bad)} after step {step.step}{what}"
    fields = {"parameter": bad.name, "module": bad.name.rpartition(".")[0], "evidence": _evidence(bad)} | fields
    return finding_of(POISONED, step.step, "forward", message, **fields)


def _poisoned_by(step: Step, record: Record) -> Producer | None:
    """The op that overflowed in the step, where it was replayed and FP32 is finite there."""
    made = next(iter(_finite_in_fp32(record, step)), None)
    return next((suspect.producer for suspect in suspects(made)), None) if made else None


def _is_meant(counts: TensorCounts, record: Record) -> bool:
    """Whether a finite step in FP32 leaves the buffer like this too."""
    return any(counts.name in made.fp32.buffers for made in record.investigations if is_finite(made.fp32))


def _is_healthy(step: Step) -> bool:
    return math.isfinite(step.loss) and not step.found_inf


def _finite_in_fp32(record: Record, step: Step) -> list[Investigation]:
    """The investigations of the step whose replay in FP32 is finite."""
    return [made for made in record.investigations if made.step == step.step and is_finite(made.fp32)]


def _was_bad_before(counts: TensorCounts, step: Step) -> bool:
    """A skipped step writes no parameter: one that is bad after it was bad before it."""
    if counts.kind == "batch":
        return False
    return counts.when == "before" or (counts.kind == "parameter" and step.skipped)


def _named(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more half parameters"


def counted_values(counts: TensorCounts) -> str:
    """How many of a tensor's values are inf and NaN, in words."""
    parts = [f"{number} {name}" for number, name in ((counts.inf, "inf"), (counts.nan, "NaN")) if number]
    return f"{' and '.join(parts)} among {counts.size} values"


def _evidence(counts: TensorCounts) -> dict[str, object]:
    return {
        "name": counts.name,
        "inf": counts.inf,
        "nan": counts.nan,
        "size": counts.size,
        "first_index": list(counts.first_index),
    }
