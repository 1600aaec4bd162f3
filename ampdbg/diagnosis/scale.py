"""Findings about the loss scale: a scale that settles, keeps falling, has no limit, or grows too often.

A skip is a step that the scaler withholds, because gradients are not finite. Skips are normal at the start and right
after the scale has grown. Any other skip is a new low (DIAGNOSES: fact 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from operator import attrgetter
from statistics import mode
from typing import Any, Literal

from ampdbg.diagnosis.cause import CALIBRATION, SKIPS_IN_A_ROW, Evidence, scale_floor
from ampdbg.diagnosis.decisions import Decision, Evident, holding
from ampdbg.diagnosis.producers import UNKNOWN
from ampdbg.quantities import counted, listed, number, scale
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.run import GroupOverflow, Record, Step

RUNAWAY, OSCILLATION, RESTART, COLLAPSE = "scale-runaway", "scale-oscillation", "scale-restart", "scale-collapse"

LIMITLESS = 2.0**32
"""A larger loss scale has no limit: half gradients normally overflow long before."""

SELDOM = 4
"""A loss scale that follows growing gradients skips at most one of this many steps."""

SETTLING_STEPS = 20
"""Skips within this many steps of the start (or a tenth of the run, if longer) settle the scale."""

MANY_UNEXPLAINED = "untold"
"""Evidence key for the number of unexplained skips, if there are too many to call the run healthy."""

UNEXPLAINED = "unexplained"
"""Evidence key for the skips that neither the start, nor growth, nor a replay explains. They are normal only if they
are few."""

LOWEST_USUAL = 8.0
"""A healthy model seldom needs a lower loss scale: its half gradients would be flushed to zero."""

LOWS_OF_A_COLLAPSE = 3
"""This many new lows after settling mean that the scale keeps falling."""

GROWTH = 2.0
"""The factor by which a scaler raises and lowers its scale (``GradScaler``'s defaults)."""

TOO_OFTEN = 8
"""Growth is too frequent if it causes a skip in more than one of this many steps."""

FEW_TRIES = 5
"""At most this many skips right after growth are not reported."""

SOON = 8.0
"""Three skips lower the loss scale by this factor. A single image may need that much, and later images may not need
it again."""

ROOM = 4.0
"""A further batch may need a scale lower by this factor than the batch of a replayed step."""


def is_nan_alone(groups: Sequence[GroupOverflow]) -> bool:
    """True if the gradients of a step have NaN but no inf, as from a root of zero.

    Overflow by the loss scale usually leaves some inf. But inf combined with inf is NaN, and so is clipping by an
    infinite norm. So the result selects steps to examine, and does not show why they failed.
    """
    counts = [parameter for group in groups for parameter in group.parameters]
    return any(parameter.nan for parameter in counts) and not any(parameter.inf for parameter in counts)


Skips = Literal["none", "own", "restarting", "raised", "following", "falling", "faulty", "settling"]
"""The kinds of skips of an optimizer.

The script itself withholds ``own`` steps. ``restarting`` comes from ever new scalers, ``raised`` from a scale that
grows too often, and ``following`` from growing gradients. ``falling`` is a scale that keeps falling, ``settling`` one
that settles. No lower scale cures ``faulty`` steps.
"""


@dataclass(frozen=True, eq=False)
class Scaling(Evident):
    """The facts about the loss scale of one optimizer.

    Attributes:
        steps: its steps with a scaler; all steps if there is none.
        ran: the number of these steps, with those that a long run omits.
        run: the record of the optimizer alone.
    """

    steps: Sequence[Step]
    ran: int
    run: Record

    # The course of the scale

    @cached_property
    def grown(self) -> set[int]:
        """The numbers of the steps with a larger scale than the step before."""
        return {now.step for before, now in pairwise(self.steps) if now.scale > before.scale}

    @cached_property
    def starts(self) -> list[int]:
        """The iterations at which a scaler starts: the first step, and jumps of the scale at a new model, as in each
        fold of a cross-validation. Such a jump stays. If an optimizer has two scalers, the scale alternates instead."""
        threes = zip(self.steps, self.steps[1:], self.steps[2:], strict=False)
        leaps = (
            now.iteration for before, now, after in threes if after.scale * GROWTH >= now.scale > GROWTH * before.scale
        )
        return [*(step.iteration for step in self.steps[:1]), *leaps]

    @cached_property
    def lows(self) -> list[Step]:
        """The new lows: skipped steps that neither a start nor growth of the scale explains."""
        settling = max(SETTLING_STEPS, self.ran // 10)
        later = self._relapses
        begun = (max(start for start in self.starts if start <= step.iteration) for step in later)
        return [step for step, start in zip(later, begun, strict=True) if step.iteration - start >= settling]

    @cached_property
    def relapses(self) -> list[Step]:
        """The skips after the first taken step. Until then the scale is being found, even in a short run."""
        starts, finding, found = {*self.starts}, True, []
        for step in self.steps:
            finding = step.skipped and (finding or step.iteration in starts)
            if step.skipped and not finding:
                found.append(step)
        return found

    @property
    def skips_at_the_end(self) -> int:
        """The number of skipped steps since the last taken step."""
        return sum(1 for _ in takewhile(lambda step: step.skipped, reversed(self.steps)))

    @cached_property
    def settled_at(self) -> float | None:
        """The last scale of a taken step without a later skip at that scale or below. None if there is none, or a lower
        scale will be tried. Steps with only zero gradients are ignored, because they would be taken at any scale."""
        skipped_at, is_open = math.inf, self.will_work or self.skips_at_the_end > 1
        for step in reversed(() if is_open else self.steps):
            if step.skipped:
                skipped_at = min(skipped_at, step.scale)
            elif step.scale < skipped_at and step.grad_norm != 0.0:
                return step.scale
        return None

    @cached_property
    def keeps_falling(self) -> bool:
        """True if skips continue, at the end or throughout, or if the scale falls below 1."""
        are_many = len(self.relapses) > max(SKIPS_IN_A_ROW, self.ran // 2)
        are_low = len(self.lows) >= LOWS_OF_A_COLLAPSE or self.steps[-1].scale < 1.0
        return are_low or are_many or self.skips_at_the_end >= SKIPS_IN_A_ROW

    @cached_property
    def of_finite_losses(self) -> Scaling:
        """The course of the scale if no step with a non-finite loss had changed it."""
        kept, scale = [], self.steps[0].scale
        for step, after in zip(self.steps, [*self.steps[1:], self.steps[-1]], strict=True):
            if math.isfinite(step.loss):
                kept.append(replace(step, scale=scale))
                moved = after.scale / step.scale if step.scale > 0.0 else 1.0
                scale *= moved if step.skipped else max(moved, 1.0)  # steps in between may have been omitted
        return replace(self, steps=kept, ran=self.ran - len(self.steps) + len(kept))

    @property
    def tries(self) -> list[Step]:
        """The skipped steps right after the scale has grown."""
        return [step for step in self.steps if step.skipped and step.step in self.grown]

    def are_many(self, tries: Sequence[Step]) -> bool:
        """True if the skips cost a relevant share of the training."""
        return len(tries) > max(FEW_TRIES, self.ran // TOO_OFTEN)

    @cached_property
    def later_scalers(self) -> list[list[Step]]:
        """The steps of each scaler that replaces another, in order of first step. A scaler that does not belongs to a
        new model, as in a fold."""
        scalers: dict[int, list[Step]] = {}
        for step in self.steps:
            scalers.setdefault(step.scaler, []).append(step)
        return [steps for steps in scalers.values() if steps[0].succeeds]

    @cached_property
    def lost_to_scalers(self) -> list[Step]:
        """The skipped steps while scalers after the first settled."""
        lost = (step for steps in self.later_scalers for step in takewhile(lambda step: step.skipped, steps))
        return [step for step in lost if math.isfinite(step.loss)]

    @cached_property
    def growth_interval(self) -> int:
        """The most frequent number of taken steps before growth, counted from the last skip or growth."""
        taken, found = 0, []
        for before, now in pairwise(self.steps):
            taken = 0 if before.skipped else taken + now.iteration - before.iteration
            if now.scale > before.scale:
                found.append(taken)
                taken = 0
        return mode(found)

    # What explains its skips

    @cached_property
    def skipped(self) -> list[Step]:
        return [step for step in self.steps if step.skipped]

    @cached_property
    def has_scale(self) -> bool:
        """True if a step has a scaler, or a loss scale of the script's own."""
        return any(step.scaler or step.scale != 1.0 for step in self.steps)

    @cached_property
    def of_gradients(self) -> list[Step]:
        """The skips due to gradients. Without a loss scale, a script that skips a lost loss ran no backward pass."""
        return [step for step in self.skipped if self.has_scale or math.isfinite(step.loss)]

    @cached_property
    def replayed(self) -> list[Evidence]:
        """The steps that were replayed because of their gradients."""
        return [Evidence(made, self.run) for made in self.run.investigations if made.why == "gradients"]

    @cached_property
    def faults(self) -> list[Evidence]:
        """The replayed steps that fail at every lower scale that a dynamic scaler could find."""
        return [one for one in self.replayed if one.made.reproduced and not self.is_calibration(one)]

    @cached_property
    def lasting(self) -> list[Evidence]:
        """The replayed steps with a cause that may explain all skips.

        If the run also skips far below the scale that cures a step, the skips have another cause. For example, two
        optimizers may share the scaler. If a scale has worked before, gradients may have grown since.
        """
        lowest = min((one.scale for one in self.skipped if math.isfinite(one.loss)), default=math.inf)
        limit = math.inf if self.has_worked else ROOM * lowest
        known = self.faults or self.replayed
        return [one for one in known if not self.is_calibration(one) or one.usable_scale <= limit]

    def is_calibration(self, step: Evidence) -> bool:
        """True if the step is finite in FP32, and in FP16 at a lower scale. A dynamic scaler will find that scale."""
        if step.kept_scale is not None or not step.usable_scale or not step.is_fp32_finite:
            return False
        code = CODES[step.cause.code]
        is_of_scale = step.suspect is not None and step.suspect.needs_only_a_scale and code.verdict != "other"
        return is_of_scale or code.keeps_scale

    @cached_property
    def has_worked(self) -> bool:
        """True if a step with nonzero gradients was taken."""
        return any(not step.skipped and step.grad_norm != 0.0 for step in self.steps)

    @cached_property
    def follows_gradients(self) -> bool:
        """True if gradients grow and the scale follows: each new low works at once and loses no gradient."""
        in_a_row = any(now.skipped and before.skipped for before, now in pairwise(self.steps) if now in self.lows)
        are_many = len(self.lows) + self.run.left_out.skipped > self.ran // SELDOM
        if len(self.lows) < LOWS_OF_A_COLLAPSE or in_a_row or are_many or self.last_scale < 1.0:
            return False
        works_soon = (self.is_calibration(one) and one.usable_scale >= one.low.scale / SOON for one in self.replayed)
        return bool(self.replayed) and all(works_soon)

    @property
    def oscillates(self) -> bool:
        """True if the scale grows so often that many steps are skipped, but does not fall."""
        taken = [step.scale for step in self.steps if not step.skipped]
        return self.are_many(self.tries) and bool(taken) and taken[-1] * GROWTH**2 >= taken[0]

    @property
    def goes_on(self) -> bool:
        """True if one of the last steps was taken."""
        return any(not step.skipped for step in self.steps[-SKIPS_IN_A_ROW:])

    @property
    def will_work(self) -> bool:
        """True if replays show that a lower scale will work, and no scale as low has been tried. If the loss
        contains a gradient penalty, steps taken at a higher scale were steps without the penalty."""
        of_penalty = self.replayed[: int(self.run.scales_gradients and self.keeps_falling)]
        is_open = not self.has_worked or any(one.usable_scale < self.last_scale for one in of_penalty)
        return bool(self.lasting) and all(map(self.is_calibration, self.replayed)) and is_open

    @cached_property
    def skip_kind(self) -> Skips:
        return next(kind for kind, holds in KINDS.items() if holds(self))

    @cached_property
    def fails_by_itself(self) -> bool:
        """True if a scale falls although losses are finite. If no loss is finite, the forward pass is the root."""
        if self.skip_kind != "falling":
            return False
        course = self.of_finite_losses
        return bool(self.faults) or (any(step.skipped for step in course.steps) and course.keeps_falling)

    @property
    def to_blame(self) -> list[Evidence]:
        """The replayed steps that explain the skips. For a falling scale, the first lasting one."""
        return self.faults if self.skip_kind == "faulty" else self.lasting[: int(self.fails_by_itself)]

    def causes(self) -> Iterator[Finding]:
        """Yield the first cause, and each further cause with a new code and a new line."""
        found: list[Finding] = []
        for step in self.to_blame:
            if all(step.cause.code != one.code and step.cause.source != one.source for one in found):
                found.append(step.cause)
        yield from found

    @cached_property
    def fails_at_one(self) -> Step | None:
        """The step with a finite loss that failed at a scale of 1, where the run continues below 1; else None. It is
        None unless a lower scale has been shown to work, and also if FP32 fails in such steps."""
        if not self._works_below_one or any(one.has_fp32_answer and not one.is_of_precision for one in self.replayed):
            return None
        failed = (step for step in self.skipped if 1.0 <= step.scale < 2.0 and math.isfinite(step.loss))
        return next(failed, None)

    @property
    def _works_below_one(self) -> bool:
        """True if the run ends at a scale below 1 that works.

        Gradients are finite and nonzero there, and the last sequence of taken steps is the longest at low scales. Two
        optimizers may share a scaler. If one always fails, the steps in between belong to the second.
        """
        if self.last_scale >= 1.0 or self.steps[-1].skipped:
            return False
        low = [one for one in self.steps if one.scale < 2.0 and not (one.skipped and one.step in self.grown)]
        *earlier, last = [list(row) for is_skip, row in groupby(low, attrgetter("skipped")) if not is_skip]
        has_gradients = any(0.0 < (step.grad_norm or 0.0) < math.inf for step in last)
        return has_gradients and all(len(row) < len(last) for row in earlier)

    @property
    def are_many_unexplained(self) -> bool:
        return bool(self._doubtful)

    @cached_property
    def _doubtful(self) -> list[Step]:
        """The skips due to which the run is not called healthy. If nothing was compared with FP32, these are all, if
        they are costly. If no step was reproduced, skips between taken steps that are frequent and continue."""
        if self.are_costly and not self.run.investigations:
            return self.skipped
        goes_on = any(self.steps[-1].iteration - step.iteration < SETTLING_STEPS for step in self._relapses[-1:])
        are_many = goes_on and not self._explained and len(self._relapses) >= LOWS_OF_A_COLLAPSE
        return self._relapses * are_many

    @property
    def are_costly(self) -> bool:
        """True if at least half of the steps are skipped, or the scale settles lower than healthy models need. Before
        ``SKIPS_IN_A_ROW`` skips, no replay is due."""
        return SKIPS_IN_A_ROW <= len(self.skipped) >= self.ran / 2 or (self.settled_at or math.inf) < LOWEST_USUAL

    @property
    def _relapses(self) -> list[Step]:
        return [step for step in self.relapses if step.step not in self.grown]

    @property
    def _explained(self) -> set[int]:
        return {made.step for made in self.run.investigations if made.reproduced}

    @cached_property
    def unexplained(self) -> list[int]:
        """The numbers of the skips without an explanation by calibration or a replay. They are new lows, and NaN
        without inf at the first step or after a taken step. If skips are many or costly, all are included."""
        behind_sound = [now for before, now in pairwise(self.steps) if not before.skipped and now in self._relapses]
        early = [*self.steps[:1], *behind_sound]
        of_nan = [step for step in early if step.skipped and is_nan_alone(step.groups)]
        found = (*self.lows, *(self._doubtful or of_nan))
        return [step.step for step in self.steps if step in found and step.step not in self._explained]

    @cached_property
    def telling(self) -> list[Step]:
        """The most informative skips: new lows if there are enough, preferably with a finite loss."""
        found = self.lows if len(self.lows) >= LOWS_OF_A_COLLAPSE else self.skipped
        return [step for step in found if math.isfinite(step.loss)] or self.skipped

    @cached_property
    def narrowest(self) -> Step:
        """The skipped step that affects the fewest groups, because few groups show the place of the fault. A long
        run does not list the groups of every step."""
        return min(self.skipped, key=lambda one: (not one.groups, one not in self.telling, len(one.groups), one.step))

    @cached_property
    def groups(self) -> list[str]:
        """The names of the groups that the narrowest step affects."""
        return [group.name for group in self.narrowest.groups]

    @property
    def module(self) -> str:
        """The innermost module that contains all these groups."""
        parts = zip(*(name.split(".")[:-1] for name in self.groups), strict=False)
        return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))

    # Numbers for messages

    @property
    def last_scale(self) -> float:
        return self.steps[-1].scale

    @property
    def falling(self) -> list[Step]:
        """The consecutive skips up to the first new low; all skips if there is none."""
        if not self.lows:
            return self.skipped
        until = self.steps[: self.steps.index(self.lows[0]) + 1]
        return list(takewhile(attrgetter("skipped"), reversed(until)))[::-1]

    @property
    def first_scale(self) -> float:
        """The scale before the fall. If the scale follows gradients, it is at the first new low."""
        return (self.lows if self.skip_kind == "following" else self.steps)[0].scale

    @property
    def is_lower(self) -> bool:
        """True if the scale keeps falling, and is below its values at the first step and the first skip."""
        return self.skip_kind == "falling" and self.last_scale < min(self.first_scale, self.skipped[0].scale)

    @property
    def new_lows(self) -> int:
        return len(self.lows)

    @property
    def many(self) -> int:
        """The number of steps skipped due to gradients, including omitted steps."""
        return len(self.of_gradients) + self.run.left_out.skipped

    @property
    def cost(self) -> int:
        """The number of skips that new scalers or frequent growth caused."""
        return len(self.lost_to_scalers if self.skip_kind == "restarting" else self.tries)

    @property
    def untold(self) -> int | None:
        """The number of unexplained skips if they are too many to call the run healthy, else None."""
        return len(self.unexplained) if self.are_many_unexplained else None

    @property
    def succession(self) -> int:
        """The number of scalers that replace one another."""
        return len(self.later_scalers) + 1

    # Text of messages

    @property
    def new_scaler(self) -> str:
        """The scale of the last scaler, and how often a new one starts."""
        begun = [self.steps[0], *(steps[0] for steps in self.later_scalers)]
        apart = mode(now.iteration - before.iteration for before, now in pairwise(begun))
        every = counted(apart, "step") if apart > 1 else "step"
        return f"a new one, at a loss scale of {scale(begun[-1].scale)}, every {every}"

    @property
    def lower_start(self) -> float | None:
        """The lowest scale that worked, if a new scaler starts above it; else None."""
        start = self.later_scalers[-1][0].scale
        return min((one.scale for one in self.steps if not one.skipped and one.scale < start), default=None)

    @property
    def is_own(self) -> bool:
        """True if the script itself scales its loss and withholds steps."""
        return self.run.script is not None and not self.steps[-1].scaler

    @property
    def who(self) -> str:
        return "the script itself" if self.is_own else "the scaler"

    @property
    def behind(self) -> str:
        """The number of taken steps before growth, in words."""
        interval = self.growth_interval
        return counted(interval, "taken step") if interval > 1 else "every taken step"

    @property
    def settles(self) -> str:
        """Where the scale has settled, and which skips no replay explains."""
        settled, steps = self.settled_at, self.unexplained
        where = "settles: it has not settled yet, and a longer run will show where it does"
        where = where if settled is None else f"settled at {number(settled)}" + ": this is normal" * (not steps)
        if not steps:
            return where
        why = "some skips come neither at the start nor after the scale has grown"
        if self.are_costly:
            why = "healthy models lose fewer steps, and need no loss scale so low"
        elif steps[0] == self.steps[0].step:
            why = "the first step has NaN and no inf, which a lower scale may not cure"
        named = ("steps " if steps[1:] else "step ") + listed(map(str, steps), 3)
        are_few = settled is not None and not self.are_many_unexplained and SELDOM * len(self.skipped) <= self.ran
        few = ", but so few skipped steps do no harm" * are_few
        return f"{where}; {why}. No replay compared {named} with FP32{few}"

    @property
    def advice(self) -> str:
        """The advice that avoids the skips of a scale that has settled."""
        settled = self.settled_at
        if settled is None or self.are_many_unexplained:
            return ""
        # A scale that has grown would grow again.
        is_lower = not self.tries and settled < min(self.steps[0].scale, *(step.scale for step in self.skipped))
        start = f"starting at {number(settled)}" if self.is_own else f"GradScaler(init_scale={settled:g})"
        saving = f"; {start} saves the skipped steps" * is_lower
        return f"none is needed{' while they are so few' if self.unexplained else saving}"

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """Return the step at which the fault begins, in the backward pass."""
        begins = {
            RESTART: self.lost_to_scalers,
            OSCILLATION: self.tries,
            UNKNOWN: self.telling,
            CALIBRATION: self.skipped,
            RUNAWAY: self.steps[-1:],
        }
        first = next(iter(begins.get(row.code, self.falling)))
        found = {"step": first.step, "phase": "backward"}
        if row.code == RESTART and self.run.took_no_step:
            return {**found, "severity": "error"}
        if row.code == UNKNOWN:
            return {**found, "module": self.module, "parameter": self.groups[0] if len(self.groups) == 1 else ""}
        return found


KINDS: Mapping[Skips, Callable[[Scaling], bool]] = {
    "none": lambda it: not it.of_gradients,
    "own": lambda it: not (it.has_scale or it.faults),
    "restarting": lambda it: it.are_many(it.lost_to_scalers) and not it.faults,
    "raised": lambda it: it.oscillates and not it.faults,
    "following": lambda it: it.follows_gradients,
    "falling": lambda it: it.keeps_falling and not it.will_work,
    "faulty": lambda it: bool(it.faults),
    "settling": lambda it: True,
}
"""The condition of each kind of skips; the first that holds decides."""

# The decision tables

ENDS = {"first_scale": "first_scale", "last_scale": "last_scale", "new_lows": "new_lows"}

SKIPS: tuple[Decision[Scaling], ...] = (
    Decision(
        RESTART,
        "new scalers replace one another, and over one step in eight is skipped while a later one settles",
        lambda it: it.skip_kind == "restarting",
        "{succession} scalers replace one another: {new_scaler}; {cost} of {ran} steps were skipped while later ones "
        "settled",
        {"skipped": "cost", "scalers": "succession"},
        CODES[RESTART].remedy + "[, or start with GradScaler(init_scale={lower_start:g})]",
    ),
    Decision(
        OSCILLATION,
        "over one step in eight is skipped right after the loss scale grew, and the scale does not fall",
        lambda it: it.skip_kind == "raised",
        "the loss scale grows after {behind} (growth_interval={growth_interval:d}), and {cost} of {ran} steps were "
        "skipped right after that",
        {"skipped": "cost", "growth_interval": "growth_interval"},
    ),
    Decision(
        "gradient-growth",
        "at least 3 single skips after the scale settled, each finite in replays at scales up to 8 times lower",
        lambda it: it.skip_kind == "following",
        "gradients grow, and the loss scale follows them from {first_scale} to {last_scale} in {new_lows:d} "
        "single skips; at lower scales replays are finite and lose no gradient",
        ENDS,
    ),
    Decision(
        UNKNOWN,
        "the loss scale keeps falling although losses are finite, and neither a replay nor a scale below 1 shows why",
        lambda it: it.fails_by_itself and not it.to_blame and it.fails_at_one is None,
        "gradients are not finite in {many:d} of {ran:d} steps, although the loss is; step {narrowest.step:d} narrows "
        "them down to {groups:d} of {run.groups:d} groups: {groups}",
        {"skipped": "many", "narrowest_step": "narrowest.step", "groups": "groups"},
    ),
    Decision(
        COLLAPSE,
        "the loss scale keeps falling: 3 new lows, 5 skips in a row at the end, or below 1; it follows from the root",
        lambda it: it.is_lower and scale_floor(it.steps) is None and it.fails_at_one is None,
        "the loss scale keeps falling, from {first_scale:scale} to {last_scale:scale}",
        ENDS,
    ),
    Decision(
        CALIBRATION,
        "the script itself withholds steps, at no loss scale that is seen, and takes one of the last five: information",
        lambda it: it.skip_kind == "own" and it.goes_on,
        "the script itself withheld {many:step}, whose gradients were not finite; it took others since",
        {"skipped": "many"},
        "",
        "info",
    ),
    Decision(
        UNKNOWN,
        "the script itself withholds steps, its last five among them, and no replay shows why",
        lambda it: it.skip_kind == "own" and not it.goes_on,
        "the script itself withheld {many:d} of {ran:d} steps: gradients were not finite, although the loss was",
        {"skipped": "many"},
    ),
    Decision(
        CALIBRATION,
        "every skip is at the start, right after growth, or finite at a lower scale: information",
        lambda it: it.skip_kind == "settling",
        "{who} skipped {many:step} while the loss scale {settles}",
        {"skipped": "many", "scale": "settled_at", UNEXPLAINED: "unexplained", MANY_UNEXPLAINED: "untold"},
        "{advice}",
        "info",
    ),
)

LIMITS: tuple[Decision[Scaling], ...] = (
    Decision(
        RUNAWAY,
        "the loss scale grew beyond 2**32, and no gradient limits it",
        lambda it: it.first_scale < it.last_scale >= LIMITLESS and not it.steps[-1].skipped,
        "the loss scale grew to {last_scale}, and no gradient limits it",
        {"scale": "last_scale"},
        severity="warning",
    ),
    Decision(
        RUNAWAY,
        "gradients of a finite loss are not finite at a loss scale of 1, FP32's are, and a lower scale works",
        lambda it: it.fails_at_one is not None,
        "only a loss scale below 1 works ({last_scale:g}): at 1, half gradients of a loss of {fails_at_one.loss} are "
        "not finite",
        {"scale": "last_scale"},
    ),
)


def scalings(record: Record) -> Iterator[Scaling]:
    """Yield the facts about the loss scale of each optimizer with a step."""
    for run in filter(attrgetter("steps"), record.timelines):
        scaled = replace(run, steps=run.scaled_steps)
        yield Scaling(scaled.steps, scaled.steps_run, run)


def skips(record: Record) -> Iterator[Finding]:
    """Yield the cause of each optimizer's skips, and for each scaler a consequence or ``scale-calibration``."""
    found: dict[tuple[str, int], Finding] = {}
    for scaling in scalings(record):
        yield from scaling.causes() if scaling.skipped else ()
        new = {(row.code, scaling.steps[-1].scaler): row.finding(scaling) for row in holding(SKIPS, scaling)}
        yield from (new[key] for key in new if key not in found)
        found |= new
