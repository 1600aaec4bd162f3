"""Findings about the loss scale: skips that are calibration, a scale that keeps falling, one without limit, one
that is raised too often.

Skips are normal at the start and right after the scale has grown. A skip at any other time is a new low
(DIAGNOSES: fact 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, takewhile
from operator import attrgetter
from statistics import mode

from ampdbg import quantities
from ampdbg.agreement import is_finite
from ampdbg.diagnosis.cause import (
    CALIBRATION,
    DIVERGENCE,
    SKIPS_IN_A_ROW,
    cause_of,
    failing_elsewhere,
    first_in_a_row,
    scale_floor,
    was_replayed,
)
from ampdbg.diagnosis.producers import OVERFLOWS, UNKNOWN, culprit, survivor
from ampdbg.levels import has_static_scale
from ampdbg.quantities import counted, listed, number
from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import GroupOverflow, Investigation, Record, Step

RUNAWAY = "scale-runaway"
OSCILLATION, RESTART = "scale-oscillation", "scale-restart"

LIMITLESS = 2.0**32
"""A larger loss scale is limited by nothing: a half gradient overflows long before."""

SELDOM = 4
"""A loss scale that follows growing gradients skips at most one step in so many."""

SETTLING_STEPS = 20
"""Skips within so many steps of the start (or a tenth of the run, if longer) settle the scale."""

UNTOLD = "untold"
"""The evidence of how many skips nothing has explained, where they are so many that nothing is known to be well."""

UNEXPLAINED = "unexplained"
"""The evidence of which skips neither the start, nor growth, nor a replay explains: of those nothing is normal but that
they are few."""

NOT_EXPLAINED = "neither the start nor a scale just grown explains"

LOWS_OF_A_COLLAPSE = 3
"""So many new lows after settling are a scale that keeps falling."""

GROWTH = 2.0
"""A scaler multiplies its scale by so much at a time, and divides it by so much (``GradScaler``'s own factors)."""

TOO_OFTEN = 8
"""More than one step in so many that is skipped because the scale has just grown is more than a try now and then."""

FEW_TRIES = 5
"""So few skips right behind a growth are no loss worth telling of."""

SOON = 8.0
"""A loss scale that many times lower is found by three skips; a single image may ask for that, and no other again."""

ROOM = 4.0
"""Other batches may need a scale that is so many times lower than the one at which a step has been run again."""


def skips(record: Record) -> Iterator[Finding]:
    """``scale-calibration`` for skips that are normal; else what keeps overflowing, and ``scale-collapse``.

    A skipped step that a lower scale would have come through is calibration, unless the scale goes on
    falling; one that no scale cures is a fault, however seldom.
    """
    skipped = [step for step in record.steps if step.skipped]
    if not skipped:
        return
    lows = new_lows(record.steps, record.steps_run)
    investigated = [made for made in record.investigations if made.why == "gradients"]
    faults = [made for made in investigated if made.reproduced and not is_calibration(made, record)]
    raised = restart(record) or oscillation(record)
    if raised is not None and not faults:
        yield raised
    elif _follows_gradients(lows, investigated, record):
        yield _growth(lows, record)
    elif _keeps_overflowing(record.steps, record.steps_run) and not is_first_descent(investigated, record):
        # A loss that is not finite makes every gradient so; then the forward pass is the root, found elsewhere.
        if faults or _overflows_behind_a_finite_loss(record):
            made = next((one for one in faults or investigated if lasts(one, record)), None)
            yield _cause(made, record) if made else _overflowing_gradients(skipped, record)
        is_lower = record.steps[-1].scale < min(record.steps[0].scale, skipped[0].scale)
        if is_lower and scale_floor(record.steps) is None and not _fails_at_one(record):
            yield _collapse((lows or skipped)[0].step, len(lows), record)
    elif faults:
        yield from _distinct(_cause(made, record) for made in faults)
    else:
        yield _calibration(skipped, record)


def _distinct(causes: Iterable[Finding]) -> Iterator[Finding]:
    """The first, and each that is of another kind and another line than those before it."""
    codes, lines = set[str](), set[Source | None]()
    for found in causes:
        if not codes or (found.code not in codes and found.source not in lines):
            yield found
        codes.add(found.code)
        lines.add(found.source)


def settled_at(steps: Sequence[Step]) -> float | None:
    """The last loss scale at which a step was taken, and none skipped since at so small a one; None before that.

    A step whose every gradient was zero would have been taken at any scale, and tells of none.
    """
    if _skips_at_the_end(steps) > 1:
        return None
    skipped_at = math.inf
    for step in reversed(steps):
        if step.skipped:
            skipped_at = min(skipped_at, step.scale)
        elif step.scale < skipped_at and step.grad_norm != 0.0:
            return step.scale
    return None


def new_lows(steps: Sequence[Step], ran: int) -> list[Step]:
    """The skipped steps that neither a start, in a run of ``ran`` steps, nor a scale just grown explains."""
    settling = max(SETTLING_STEPS, ran // 10)
    grown = just_grown(steps)
    starts = _starts(steps)
    return [
        step
        for step in steps
        if step.skipped and step.step not in grown
        if step.iteration - max(start for start in starts if start <= step.iteration) >= settling
    ]


def is_nan_alone(groups: Sequence[GroupOverflow]) -> bool:
    """Whether what is not finite in the gradients of a step is NaN alone, as of a root of zero.

    What overflows because of the loss scale mostly leaves some inf. But inf that meets inf is NaN too, and clipping
    by an infinite norm makes NaN of it: this tells which steps to look at, not why they failed.
    """
    counts = [parameter for group in groups for parameter in group.parameters]
    return any(parameter.nan for parameter in counts) and not any(parameter.inf for parameter in counts)


def _starts(steps: Sequence[Step]) -> list[int]:
    """Where a scaler begins: its first step, and those of a new model, as in each fold of a cross-validation.

    There the scale leaps, and stays; it takes turns where an optimizer has two scalers.
    """
    leaps = (
        now.iteration
        for before, now, after in zip(steps, steps[1:], steps[2:], strict=False)
        if now.scale > GROWTH * before.scale and after.scale * GROWTH >= now.scale
    )
    return [*(step.iteration for step in steps[:1]), *leaps]


def runaway(record: Record) -> Iterator[Finding]:
    """``scale-runaway``: a loss scale that nothing limits, or that only works below 1."""
    if not record.steps:
        return
    first, step = record.steps[0], record.steps[-1]
    if step.scale >= LIMITLESS and step.scale > first.scale and not step.skipped:
        message = f"the loss scale has grown to {number(step.scale)}, and no gradient limits it"
        yield finding_of(RUNAWAY, step.step, "backward", message, severity="warning", evidence={"scale": step.scale})
    elif (failed := _fails_at_one(record)) is not None:
        loss = number(failed.loss)
        message = (
            f"only a loss scale below 1 works ({step.scale:g}): at 1, half gradients of a loss of {loss} are not finite"
        )
        yield finding_of(RUNAWAY, step.step, "backward", message, evidence={"scale": step.scale})


def _fails_at_one(record: Record) -> Step | None:
    """The step for whose gradients, of a finite loss, a scale of 1 was too large, where the run goes on below it.

    None where no lower scale has been shown to work, and where FP32 does not come through such steps either.
    """
    steps = record.steps
    investigated = (made for made in record.investigations if made.why == "gradients")
    if not _works_below_one(steps) or any(_fails_in_fp32_too(made, record) for made in investigated):
        return None
    failed = (step for step in steps if step.skipped and 1.0 <= step.scale < 2.0 and math.isfinite(step.loss))
    return next(failed, None)


def _works_below_one(steps: Sequence[Step]) -> bool:
    """Whether the run ends at a scale below 1 that has been shown to work: gradients came through, and more steps in a
    row than had come through so far down before another skip.

    Where two optimizers share a scaler and the steps of one always fail, those between are the other's.
    """
    grown = just_grown(steps)
    low = [step for step in steps if step.scale < 2.0 and not (step.skipped and step.step in grown)]
    if steps[-1].scale >= 1.0 or steps[-1].skipped:
        return False
    *earlier, last = [list(row) for skipped, row in groupby(low, attrgetter("skipped")) if not skipped]
    has_gradients = any(0.0 < (step.grad_norm or 0.0) < math.inf for step in last)
    return has_gradients and all(len(row) < len(last) for row in earlier)


def _fails_in_fp32_too(made: Investigation, record: Record) -> bool:
    """Whether FP32 does not come through the step either, or diverges."""
    if not was_replayed(made):
        return False
    return not is_finite(made.fp32) or cause_of(made, record).code == DIVERGENCE


def _cause(made: Investigation, record: Record) -> Finding:
    """The cause with the first of the skipped steps in a row that end in the replayed one: all have its weights."""
    found = cause_of(made, record)
    skipped = {step.step for step in record.steps if step.skipped and math.isfinite(step.loss)}
    first = first_in_a_row(found.step, skipped, record, failing_elsewhere(made, record))
    if first == found.step or found.phase not in OVERFLOWS or found.code == DIVERGENCE:
        return found
    message = f"{found.message}; step {found.step} was replayed, and every step from {first} on was skipped"
    return replace(found, step=first, message=message, evidence={**found.evidence, "replayed_step": found.step})


def _follows_gradients(lows: Sequence[Step], investigated: list[Investigation], record: Record) -> bool:
    """Whether gradients grow and the loss scale follows them: each new low works at once, and loses nothing."""
    steps = record.steps
    in_a_row = any(now.skipped and before.skipped for before, now in pairwise(steps) if now in lows)
    are_many = len(lows) + record.left_out.skipped > record.steps_run // SELDOM
    if len(lows) < LOWS_OF_A_COLLAPSE or in_a_row or are_many or steps[-1].scale < 1.0:
        return False
    return bool(investigated) and all(works_soon_below(made, record) for made in investigated)


def _keeps_overflowing(steps: Sequence[Step], ran: int) -> bool:
    return (
        len(new_lows(steps, ran)) >= LOWS_OF_A_COLLAPSE
        or _skips_at_the_end(steps) >= SKIPS_IN_A_ROW
        or steps[-1].scale < 1.0
        or len(_relapses(steps)) > max(SKIPS_IN_A_ROW, ran // 2)
    )


def _overflows_behind_a_finite_loss(record: Record) -> bool:
    """Whether the scale would keep falling without the steps whose loss is not finite, and not merely settle."""
    finite = [step for step in _without_lost(record.steps) if math.isfinite(step.loss)]
    ran = record.steps_run - len(record.steps) + len(finite)
    return any(step.skipped for step in finite) and _keeps_overflowing(finite, ran)


def _without_lost(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps with the loss scale that they would have if none whose loss is not finite had moved it."""
    scale = steps[0].scale
    for step, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
        yield replace(step, scale=scale)
        if math.isfinite(step.loss) and step.scale > 0.0:
            moved = after.scale / step.scale
            scale *= moved if step.skipped else max(moved, 1.0)  # steps in between may have been left out


def _skips_at_the_end(steps: Sequence[Step]) -> int:
    return sum(1 for _ in takewhile(lambda step: step.skipped, reversed(steps)))


def _relapses(steps: Sequence[Step]) -> list[Step]:
    """The skips after the first step that worked: until then a scale is being found, however short the run."""
    starts, finding, relapses = {*_starts(steps)}, True, []
    for step in steps:
        finding = step.skipped and (finding or step.iteration in starts)
        relapses += [step] * (step.skipped and not finding)
    return relapses


def _overflowing_gradients(skipped: Sequence[Step], record: Record) -> Finding:
    """The groups of the step that hit the fewest: where few groups are hit, they name the place."""
    lows = new_lows(record.steps, record.steps_run)
    telling = lows if len(lows) >= LOWS_OF_A_COLLAPSE else skipped
    telling = [step for step in telling if math.isfinite(step.loss)] or skipped
    # A long run does not list the groups of every step.
    with_groups = [step for step in telling if step.groups] or [step for step in skipped if step.groups] or telling
    narrowest = min(with_groups, key=lambda step: (len(step.groups), step.step))
    names = [group.name for group in narrowest.groups]
    many = len(skipped) + record.left_out.skipped
    paths = [name.split(".")[:-1] for name in names]
    return finding_of(
        UNKNOWN,
        telling[0].step,
        "backward",
        f"gradients are not finite in {many} of {record.steps_run} steps, although the loss is; "
        f"step {narrowest.step} narrows them down to {len(names)} of {len(record.groups)} groups: {listed(names, 3)}",
        module=".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, zip(*paths, strict=False))),
        parameter=names[0] if len(names) == 1 else "",
        evidence={
            "skipped": many,
            "narrowest_step": narrowest.step,
            "groups": names[:20],
        },
    )


def _collapse(start: int, lows: int, record: Record) -> Finding:
    first, last = record.steps[0].scale, record.steps[-1].scale
    return finding_of(
        "scale-collapse",
        start,
        "backward",
        f"the loss scale keeps falling, from {quantities.scale(first)} to {quantities.scale(last)}",
        evidence={"first_scale": first, "last_scale": last, "new_lows": lows},
        root=0,
    )


def _growth(lows: Sequence[Step], record: Record) -> Finding:
    first, last = lows[0], record.steps[-1].scale
    return finding_of(
        "gradient-growth",
        first.step,
        "backward",
        f"gradients grow, and the loss scale follows them from {number(first.scale)} to {number(last)} in "
        f"{len(lows)} single skips; replays are finite at lower ones and lose no gradient there",
        evidence={"first_scale": first.scale, "last_scale": last, "new_lows": len(lows)},
    )


def _calibration(skipped: Sequence[Step], record: Record) -> Finding:
    settled, count = settled_at(record.steps), counted(len(skipped), "step")
    untold, are_many = _untold(record)
    is_lower = settled is not None and settled < min(record.steps[0].scale, *(step.scale for step in skipped))
    where = "settles: it has not settled yet, and a longer run will show where it does"
    saving = f"; GradScaler(init_scale={settled:g}) saves the skipped steps" if is_lower else ""
    named = ("steps " if untold[1:] else "step ") + listed([str(step.step) for step in untold], 3)
    explains = "NaN without any inf need not be the scale's at" if untold[:1] == [record.steps[0]] else NOT_EXPLAINED
    are_few = settled is not None and not are_many and 2 * len(skipped) <= record.steps_run
    unknown = (
        f"; {explains} {named}, and no replay has told whether FP32 fails too"
        + ": so few withheld steps do no harm" * are_few
    )
    return finding_of(
        CALIBRATION,
        skipped[0].step,
        "backward",
        f"the scaler skipped {count} while the loss scale "
        + (where if settled is None else f"settled at {number(settled)}{': this is normal' * (not untold)}")
        + unknown * bool(untold),
        severity="info",
        remedy="" if settled is None or are_many else f"none is needed{' while they are so few' if untold else saving}",
        evidence={"skipped": len(skipped)}
        | ({} if settled is None else {"scale": settled})
        | ({UNEXPLAINED: [step.step for step in untold[:20]]} if untold else {})
        | ({UNTOLD: len(untold)} if are_many else {}),
    )


def _untold(record: Record) -> tuple[list[Step], bool]:
    """The skips that are no plain calibration, and of which no replay has told what they are; and whether they are so
    many that nothing is known to be well.

    That is where no step at all could be run again, and those between steps that worked are not few, and go on.
    """
    replayed = {made.step for made in record.investigations if made.reproduced}
    grown = just_grown(record.steps)
    relapses = [step for step in _relapses(record.steps) if step.step not in grown]
    goes_on = bool(relapses) and record.steps[-1].iteration - relapses[-1].iteration < SETTLING_STEPS
    are_many = goes_on and not replayed and len(relapses) >= LOWS_OF_A_COLLAPSE
    behind_sound = (now for before, now in pairwise(record.steps) if not before.skipped and now in relapses)
    first = (step for step in record.steps[:1] if step.skipped)
    unlike_a_scale = [step for step in (*first, *behind_sound) if is_nan_alone(step.groups)]
    untold = (*new_lows(record.steps, record.steps_run), *(relapses if are_many else unlike_a_scale))
    return [step for step in record.steps if step in untold and step.step not in replayed], are_many


# A loss scale that is raised so often, by its scaler or by a new one, that much of the training is lost to it


def just_grown(steps: Sequence[Step]) -> set[int]:
    """The numbers of the steps whose scale is larger than that of the step before."""
    return {now.step for before, now in pairwise(steps) if now.scale > before.scale}


def _tries(steps: Sequence[Step]) -> list[Step]:
    """The skipped steps whose scale had just grown."""
    grown = just_grown(steps)
    return [step for step in steps if step.skipped and step.step in grown]


def _are_many(tries: int, record: Record) -> bool:
    return tries > max(FEW_TRIES, record.steps_run // TOO_OFTEN)


def oscillation(record: Record) -> Finding | None:
    """``scale-oscillation``: how often the scale grows, and what its tries have cost; None where they are few, or
    where the scale falls all the same."""
    tries, taken = _tries(record.steps), [step.scale for step in record.steps if not step.skipped]
    if not (_are_many(len(tries), record) and taken and taken[-1] * GROWTH**2 >= taken[0]):
        return None
    interval = mode(_steps_to_grow(record.steps))
    behind = counted(interval, "taken step") if interval > 1 else "every taken step"
    return finding_of(
        OSCILLATION,
        tries[0].step,
        "backward",
        f"the loss scale grows after {behind} (growth_interval={interval}), and {len(tries):,} of "
        f"{record.steps_run:,} steps were skipped right behind that",
        evidence={"skipped": len(tries), "growth_interval": interval},
    )


def restart(record: Record) -> Finding | None:
    """``scale-restart``: how often a new scaler takes the place of the last, and what it costs until its scale has
    settled; None of one scaler, of scalers that take turns or have each their optimizer, and where little is lost."""
    first, *others = _scalers_in_a_row(record.steps)
    later = [steps for steps in others if any(step.succeeds for step in steps)]  # else of another model, as of a fold
    lost = [step for steps in later for step in takewhile(lambda step: step.skipped, steps) if math.isfinite(step.loss)]
    if not _are_many(len(lost), record):
        return None
    begun, taken = later[-1][0], [step.scale for step in record.steps if not step.skipped]
    apart = _apart([first, *later])
    found = finding_of(
        RESTART,
        lost[0].step,
        "backward",
        f"{len(later) + 1:,} scalers follow one another: a new one, at a loss scale of "
        f"{quantities.scale(begun.scale)}, every {counted(apart, 'step') if apart > 1 else 'step'}; {len(lost):,} of "
        f"{record.steps_run:,} steps were skipped while those behind the first settled",
        severity="warning" if taken else "error",
        evidence={"skipped": len(lost), "scalers": len(later) + 1},
    )
    at = f", or begin with GradScaler(init_scale={min(taken):g})" if taken and min(taken) < begun.scale else ""
    return replace(found, remedy=f"{found.remedy}{at}")


def _scalers_in_a_row(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of each scaler, in order; all in one where a scaler has come back, as where two take turns."""
    scaled = [step for step in steps if step.scaler]
    rows = [list(row) for _, row in groupby(scaled, attrgetter("scaler"))]
    return rows if len(rows) == len({step.scaler for step in scaled}) > 0 else [scaled]


def _apart(rows: Sequence[Sequence[Step]]) -> int:
    """How many steps lie between the beginnings of two scalers, most often."""
    return mode(now[0].iteration - before[0].iteration for before, now in pairwise(rows))


def _steps_to_grow(steps: Sequence[Step]) -> Iterator[int]:
    """How many steps were taken before each growth, since a skip or the growth before it."""
    taken = 0
    for before, now in pairwise(steps):
        taken = 0 if before.skipped else taken + now.iteration - before.iteration
        if now.scale > before.scale:
            yield taken
            taken = 0


# What a replayed step says of the loss scale: which scales would do for it, and whether the run has borne that out


def is_calibration(made: Investigation, record: Record) -> bool:
    """Whether FP32 is finite and so is FP16 at a lower scale, which a dynamic scale will find."""
    if has_static_scale(record.config) or scale_floor(record.steps) is not None or _usable_scale(made) is None:
        return False
    suspect, code = culprit(made), CODES[cause_of(made, record).code]
    is_of_scale = suspect is not None and suspect.needs_only_a_scale and code.verdict != "other"
    return is_finite(made.fp32) and (is_of_scale or code.keeps_scale)


def _usable_scale(made: Investigation) -> float | None:
    """The highest of the lower scales at which everything is finite; None where gradients are lost there."""
    survived = survivor(made)
    return survived.scale if survived and not survived.lost else None


def is_first_descent(investigated: list[Investigation], record: Record) -> bool:
    """Whether no scale has worked yet, and the replays show that one will."""
    will_work = bool(investigated) and all(is_calibration(made, record) for made in investigated)
    is_refuted = all(_is_cured_before(made, record) for made in investigated)
    return will_work and not is_refuted and not _has_worked(record)


def _has_worked(record: Record) -> bool:
    return any(not step.skipped and step.grad_norm != 0.0 for step in record.steps)


def _is_cured_before(made: Investigation, record: Record) -> bool:
    """Whether the run has skipped far below the scale that cures the step: something else is behind those skips, as
    where another optimizer has the same scaler. Where a scale has worked, gradients may have grown since."""
    usable = _usable_scale(made)
    lowest = min((step.scale for step in record.steps if step.skipped and math.isfinite(step.loss)), default=math.inf)
    return usable is not None and ROOM * lowest < usable and not _has_worked(record)


def lasts(made: Investigation, record: Record) -> bool:
    """Whether what replays of a step show goes on: not where they are finite at scales far above those of later skips,
    behind which something else is."""
    return not (is_calibration(made, record) and _is_cured_before(made, record))


def works_soon_below(made: Investigation, record: Record) -> bool:
    """Whether a loss scale that is soon found below the step's own would have done."""
    usable = _usable_scale(made)
    return usable is not None and usable >= made.low.scale / SOON and is_calibration(made, record)
