"""Findings about the loss scale: skips that are calibration, a scale that keeps falling, one without limit, one
that is raised too often.

Skips are normal at the start and right after the scale has grown. A skip at any other time is a new low
(DIAGNOSES: fact 6).
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

from ampdbg import quantities
from ampdbg.diagnosis.cause import CALIBRATION, SKIPS_IN_A_ROW, Evidence, scale_floor
from ampdbg.diagnosis.decisions import Decision, Evident, holding
from ampdbg.diagnosis.producers import UNKNOWN
from ampdbg.quantities import counted, listed, number
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.run import GroupOverflow, Record, Step

RUNAWAY, OSCILLATION, RESTART = "scale-runaway", "scale-oscillation", "scale-restart"

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


def is_nan_alone(groups: Sequence[GroupOverflow]) -> bool:
    """What is not finite in the gradients of a step is NaN alone, as of a root of zero.

    What overflows because of the loss scale mostly leaves some inf. But inf that meets inf is NaN too, and clipping
    by an infinite norm makes NaN of it: this tells which steps to look at, not why they failed.
    """
    counts = [parameter for group in groups for parameter in group.parameters]
    return any(parameter.nan for parameter in counts) and not any(parameter.inf for parameter in counts)


@dataclass(frozen=True, eq=False)
class ScaleCourse:
    """The loss scale over the steps of one optimizer; of a long run ``ran`` counts those that are left out too."""

    steps: Sequence[Step]
    ran: int

    @cached_property
    def grown(self) -> set[int]:
        """The numbers of the steps whose scale is larger than that of the step before."""
        return {now.step for before, now in pairwise(self.steps) if now.scale > before.scale}

    @cached_property
    def starts(self) -> list[int]:
        """Where a scaler begins: its first step, and those of a new model, as in each fold of a cross-validation.

        There the scale leaps, and stays; it takes turns where an optimizer has two scalers.
        """
        threes = zip(self.steps, self.steps[1:], self.steps[2:], strict=False)
        leaps = (
            now.iteration for before, now, after in threes if after.scale * GROWTH >= now.scale > GROWTH * before.scale
        )
        return [*(step.iteration for step in self.steps[:1]), *leaps]

    @cached_property
    def lows(self) -> list[Step]:
        """New lows: the skipped steps that neither a start nor a scale just grown explains."""
        settling = max(SETTLING_STEPS, self.ran // 10)
        later = [step for step in self.steps if step.skipped and step.step not in self.grown]
        begun = (max(start for start in self.starts if start <= step.iteration) for step in later)
        return [step for step, start in zip(later, begun, strict=True) if step.iteration - start >= settling]

    @cached_property
    def relapses(self) -> list[Step]:
        """The skips after the first step that worked: until then a scale is being found, however short the run."""
        starts, finding, found = {*self.starts}, True, []
        for step in self.steps:
            finding = step.skipped and (finding or step.iteration in starts)
            if step.skipped and not finding:
                found.append(step)
        return found

    @property
    def skips_at_the_end(self) -> int:
        """How many steps were skipped since the last that was taken."""
        return sum(1 for _ in takewhile(lambda step: step.skipped, reversed(self.steps)))

    @cached_property
    def settled_at(self) -> float | None:
        """The last loss scale at which a step was taken, and none skipped since at so small a one; None before that.

        A step whose every gradient was zero would have been taken at any scale, and tells of none.
        """
        skipped_at = math.inf
        for step in reversed(self.steps if self.skips_at_the_end <= 1 else ()):
            if step.skipped:
                skipped_at = min(skipped_at, step.scale)
            elif step.scale < skipped_at and step.grad_norm != 0.0:
                return step.scale
        return None

    @cached_property
    def keeps_falling(self) -> bool:
        """Skips go on, at the end or all along, or no scale of 1 and more is left."""
        are_many = len(self.relapses) > max(SKIPS_IN_A_ROW, self.ran // 2)
        are_low = len(self.lows) >= LOWS_OF_A_COLLAPSE or self.steps[-1].scale < 1.0
        return are_low or are_many or self.skips_at_the_end >= SKIPS_IN_A_ROW

    @cached_property
    def of_finite_losses(self) -> ScaleCourse:
        """The course as it would be if no step whose loss is not finite had moved the scale."""
        kept, scale = [], self.steps[0].scale
        for step, after in zip(self.steps, [*self.steps[1:], self.steps[-1]], strict=True):
            if math.isfinite(step.loss):
                kept.append(replace(step, scale=scale))
                moved = after.scale / step.scale if step.scale > 0.0 else 1.0
                scale *= moved if step.skipped else max(moved, 1.0)  # steps in between may have been left out
        return ScaleCourse(kept, self.ran - len(self.steps) + len(kept))

    @property
    def tries(self) -> list[Step]:
        """The skipped steps whose scale had just grown."""
        return [step for step in self.steps if step.skipped and step.step in self.grown]

    def are_many(self, tries: Sequence[Step]) -> bool:
        """So many skips cost a share of the training that counts."""
        return len(tries) > max(FEW_TRIES, self.ran // TOO_OFTEN)

    @cached_property
    def scalers(self) -> dict[int, list[Step]]:
        """The steps of each scaler, by its number, in the order in which they begin."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.scaler, []).append(step)
        return found

    @property
    def later_scalers(self) -> list[list[Step]]:
        """The steps of each scaler that has taken the place of another; else it is of another model, as of a fold."""
        return [steps for steps in self.scalers.values() if steps[0].succeeds]

    @cached_property
    def lost_to_scalers(self) -> list[Step]:
        """The steps that were skipped while the scalers that followed the first settled."""
        lost = (step for steps in self.later_scalers for step in takewhile(lambda step: step.skipped, steps))
        return [step for step in lost if math.isfinite(step.loss)]

    @cached_property
    def growth_interval(self) -> int:
        """How many steps were taken before a growth, most often, since a skip or the growth before it."""
        taken, found = 0, []
        for before, now in pairwise(self.steps):
            taken = 0 if before.skipped else taken + now.iteration - before.iteration
            if now.scale > before.scale:
                found.append(taken)
                taken = 0
        return mode(found)


Skips = Literal["none", "own", "restarting", "raised", "following", "falling", "faulty", "settling"]
"""What the skips of an optimizer are: those of a script that withholds steps itself, the price of ever new scalers, or
of a scale that is raised too often, growing gradients that the scale follows, a scale that keeps falling, steps that no
lower scale cures, or a scale that settles."""


@dataclass(frozen=True, eq=False)
class Scaling(Evident, ScaleCourse):
    """What is known of the loss scale of one optimizer, each fact once: ``run`` is the record of it alone, and
    ``steps`` are those whose loss a scaler has scaled."""

    run: Record

    @cached_property
    def skipped(self) -> list[Step]:
        """Those of them that were skipped."""
        return [step for step in self.steps if step.skipped]

    @cached_property
    def replayed(self) -> list[Evidence]:
        """The steps that were replayed for their gradients."""
        return [Evidence(made, self.run) for made in self.run.investigations if made.why == "gradients"]

    @cached_property
    def faults(self) -> list[Evidence]:
        """Those of them that no lower scale, which a dynamic one will find, would have come through."""
        return [one for one in self.replayed if one.made.reproduced and not self.is_calibration(one)]

    @cached_property
    def lasting(self) -> list[Evidence]:
        """Those whose cause may be that of all skips: else the run has skipped far below the scale that cures the step,
        and something else is behind that, as where another optimizer has the same scaler. Where a scale has worked,
        gradients may have grown since."""
        lowest = min((one.scale for one in self.skipped if math.isfinite(one.loss)), default=math.inf)
        limit = math.inf if self.has_worked else ROOM * lowest
        known = self.faults or self.replayed
        return [one for one in known if not self.is_calibration(one) or one.usable_scale <= limit]

    def is_calibration(self, step: Evidence) -> bool:
        """FP32 is finite and so is FP16 at a lower scale, which a dynamic scale will find."""
        if step.kept_scale is not None or not step.usable_scale or not step.is_fp32_finite:
            return False
        code = CODES[step.cause.code]
        is_of_scale = step.suspect is not None and step.suspect.needs_only_a_scale and code.verdict != "other"
        return is_of_scale or code.keeps_scale

    @cached_property
    def has_worked(self) -> bool:
        """A step with gradients was taken."""
        return any(not step.skipped and step.grad_norm != 0.0 for step in self.steps)

    def works_soon_below(self, step: Evidence) -> bool:
        """A loss scale that is soon found below the step's own would have done."""
        return self.is_calibration(step) and step.usable_scale >= step.low.scale / SOON

    @cached_property
    def follows_gradients(self) -> bool:
        """Gradients grow and the loss scale follows them: each new low works at once, and loses nothing."""
        in_a_row = any(now.skipped and before.skipped for before, now in pairwise(self.steps) if now in self.lows)
        are_many = len(self.lows) + self.run.left_out.skipped > self.ran // SELDOM
        if len(self.lows) < LOWS_OF_A_COLLAPSE or in_a_row or are_many or self.last_scale < 1.0:
            return False
        return bool(self.replayed) and all(map(self.works_soon_below, self.replayed))

    @property
    def oscillates(self) -> bool:
        """The scale grows so often that much is lost to its tries, and does not fall all the same."""
        taken = [step.scale for step in self.steps if not step.skipped]
        return self.are_many(self.tries) and bool(taken) and taken[-1] * GROWTH**2 >= taken[0]

    @property
    def goes_on(self) -> bool:
        """One of the last steps was taken."""
        return any(not step.skipped for step in self.steps[-SKIPS_IN_A_ROW:])

    @property
    def will_work(self) -> bool:
        """The replays show that a lower scale will work, and none so low has been tried: what was taken above the one
        that a loss made of scaled gradients needs are steps without such a penalty."""
        of_penalty = self.replayed[: int(self.run.scales_gradients and self.keeps_falling)]
        is_open = not self.has_worked or any(one.usable_scale < self.last_scale for one in of_penalty)
        return bool(self.lasting) and all(map(self.is_calibration, self.replayed)) and is_open

    @cached_property
    def settled_at(self) -> float | None:
        """As of any course; None where a lower scale will be tried."""
        return None if self.will_work else super().settled_at

    @cached_property
    def skips_are(self) -> Skips:
        """The first kind that holds."""
        return next(kind for kind, holds in KINDS.items() if holds(self))

    @cached_property
    def fails_by_itself(self) -> bool:
        """A scale that falls does so behind finite losses: where no loss is finite, the forward pass is the root."""
        if self.skips_are != "falling":
            return False
        course = self.of_finite_losses
        return bool(self.faults) or (any(step.skipped for step in course.steps) and course.keeps_falling)

    @property
    def to_blame(self) -> list[Evidence]:
        """The steps whose cause is that of the skips: of a scale that falls the first that lasts."""
        return self.faults if self.skips_are == "faulty" else self.lasting[: int(self.fails_by_itself)]

    def causes(self) -> Iterator[Finding]:
        """Of several the first, and each that is of another kind and another line than those before it."""
        found: list[Finding] = []
        for step in self.to_blame:
            if all(step.cause.code != one.code and step.cause.source != one.source for one in found):
                found.append(step.cause)
        yield from found

    @cached_property
    def fails_at_one(self) -> Step | None:
        """The step for whose gradients, of a finite loss, a scale of 1 was too large, where the run goes on below it.

        None where no lower scale has been shown to work, and where FP32 does not come through such steps either.
        """
        if not self._works_below_one or any(one.is_answered and not one.is_of_precision for one in self.replayed):
            return None
        failed = (step for step in self.skipped if 1.0 <= step.scale < 2.0 and math.isfinite(step.loss))
        return next(failed, None)

    @property
    def _works_below_one(self) -> bool:
        """The run ends at a scale below 1 that has been shown to work: gradients came through, and more steps in a row
        than had come through so far down before another skip.

        Where two optimizers share a scaler and the steps of one always fail, those between are the other's.
        """
        if self.last_scale >= 1.0 or self.steps[-1].skipped:
            return False
        low = [one for one in self.steps if one.scale < 2.0 and not (one.skipped and one.step in self.grown)]
        *earlier, last = [list(row) for is_skip, row in groupby(low, attrgetter("skipped")) if not is_skip]
        has_gradients = any(0.0 < (step.grad_norm or 0.0) < math.inf for step in last)
        return has_gradients and all(len(row) < len(last) for row in earlier)

    @cached_property
    def are_many_unexplained(self) -> bool:
        """No step could be replayed, and skips between steps that worked are not few, and go on."""
        relapses = self._relapses
        goes_on = bool(relapses) and self.steps[-1].iteration - relapses[-1].iteration < SETTLING_STEPS
        return goes_on and not self._explained and len(relapses) >= LOWS_OF_A_COLLAPSE

    @property
    def _relapses(self) -> list[Step]:
        return [step for step in self.relapses if step.step not in self.grown]

    @property
    def _explained(self) -> set[int]:
        return {made.step for made in self.run.investigations if made.reproduced}

    @cached_property
    def unexplained(self) -> list[int]:
        """The numbers of the skips that are no plain calibration, and of which no replay has shown what they are: new
        lows, and NaN without any inf behind a step that worked or at the very first; all relapses where those are
        many."""
        behind_sound = [now for before, now in pairwise(self.steps) if not before.skipped and now in self._relapses]
        early = [*self.steps[:1], *behind_sound]
        of_nan = [step for step in early if step.skipped and is_nan_alone(step.groups)]
        found = (*self.lows, *(self._relapses if self.are_many_unexplained else of_nan))
        return [step.step for step in self.steps if step in found and step.step not in self._explained]

    @cached_property
    def telling(self) -> list[Step]:
        """The skips that say most: the new lows, where there are enough, with a finite loss."""
        found = self.lows if len(self.lows) >= LOWS_OF_A_COLLAPSE else self.skipped
        return [step for step in found if math.isfinite(step.loss)] or self.skipped

    @cached_property
    def narrowest(self) -> Step:
        """The skipped step that hits the fewest groups: where few groups are hit, they name the place. A long run does
        not list the groups of every step."""
        return min(self.skipped, key=lambda one: (not one.groups, one not in self.telling, len(one.groups), one.step))

    @cached_property
    def groups(self) -> list[str]:
        """The groups that it hits, by name."""
        return [group.name for group in self.narrowest.groups]

    @property
    def module(self) -> str:
        """The module that they have in common."""
        parts = zip(*(name.split(".")[:-1] for name in self.groups), strict=False)
        return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))

    # Numbers

    @property
    def last_scale(self) -> float:
        """The loss scale at the end."""
        return self.steps[-1].scale

    @property
    def falling(self) -> list[Step]:
        """The row of skips that the first new low stands in, from its begin on; where there is none, the skips."""
        if not self.lows:
            return self.skipped
        until = self.steps[: self.steps.index(self.lows[0]) + 1]
        return list(takewhile(attrgetter("skipped"), reversed(until)))[::-1]

    @property
    def first_scale(self) -> float:
        """The loss scale that it comes down from: where it follows gradients that of the first new low."""
        return (self.lows if self.skips_are == "following" else self.steps)[0].scale

    @property
    def is_lower(self) -> bool:
        """It keeps falling, and is below the first, and that of the first skip."""
        return self.skips_are == "falling" and self.last_scale < min(self.first_scale, self.skipped[0].scale)

    @property
    def new_lows(self) -> int:
        """How many there are."""
        return len(self.lows)

    @property
    def many(self) -> int:
        """How many steps were skipped, with those that a long run leaves out."""
        return len(self.skipped) + self.run.left_out.skipped

    @property
    def cost(self) -> int:
        """How many were skipped because of new scalers, or because the scale is raised too often."""
        return len(self.lost_to_scalers if self.skips_are == "restarting" else self.tries)

    @property
    def untold(self) -> int | None:
        """How many they are, where they are so many that nothing is known to be well."""
        return len(self.unexplained) if self.are_many_unexplained else None

    @property
    def succession(self) -> int:
        """How many scalers follow one another."""
        return len(self.later_scalers) + 1

    # In words

    @property
    def from_to(self) -> str:
        """The first and the last loss scale."""
        return " to ".join(map(quantities.scale, (self.first_scale, self.last_scale)))

    @property
    def new_scaler(self) -> str:
        """The scale of the last scaler, and how often there is another."""
        begun = [self.steps[0], *(steps[0] for steps in self.later_scalers)]
        apart = mode(now.iteration - before.iteration for before, now in pairwise(begun))
        every = counted(apart, "step") if apart > 1 else "step"
        return f"a new one, at a loss scale of {quantities.scale(begun[-1].scale)}, every {every}"

    @property
    def lower_start(self) -> float | None:
        """The lowest loss scale that has worked, where a new scaler begins above it."""
        worked = (step.scale for step in self.steps if not step.skipped)
        return min((scale for scale in worked if scale < self.later_scalers[-1][0].scale), default=None)

    @property
    def is_own(self) -> bool:
        """The script scales its loss itself, and withholds steps itself."""
        return self.run.script is not None and not self.steps[-1].scaler

    @property
    def who(self) -> str:
        """Who withholds its steps."""
        return "the script itself" if self.is_own else "the scaler"

    @property
    def behind(self) -> str:
        """Behind how many steps the scale grows."""
        interval = self.growth_interval
        return counted(interval, "taken step") if interval > 1 else "every taken step"

    @property
    def settles(self) -> str:
        """Where the scale has settled, and what no replay explains."""
        settled, steps = self.settled_at, self.unexplained
        where = "settles: it has not settled yet, and a longer run will show where it does"
        where = where if settled is None else f"settled at {number(settled)}" + ": this is normal" * (not steps)
        if not steps:
            return where
        why = "neither the start nor a scale just grown explains every skip"
        if steps[0] == self.steps[0].step:
            why = "the first step has NaN and no inf, which a lower scale may not cure"
        named = ("steps " if steps[1:] else "step ") + listed(map(str, steps), 3)
        are_few = settled is not None and not self.are_many_unexplained and 2 * len(self.skipped) <= self.ran
        few = ", but so few skipped steps do no harm" * are_few
        return f"{where}; {why}. No replay compared {named} with FP32{few}"

    @property
    def advice(self) -> str:
        """What would save the skips of a scale that has settled."""
        settled = self.settled_at
        if settled is None or self.are_many_unexplained:
            return ""
        is_lower = settled < min(self.steps[0].scale, *(step.scale for step in self.skipped))
        start = f"starting at {number(settled)}" if self.is_own else f"GradScaler(init_scale={settled:g})"
        saving = f"; {start} saves the skipped steps" * is_lower
        return f"none is needed{' while they are so few' if self.unexplained else saving}"

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """The step at which it begins; all of it is of the backward pass."""
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
    "none": lambda it: not it.skipped,
    "own": lambda it: not any(step.scaler or step.scale != 1.0 for step in it.steps) and not it.faults,
    "restarting": lambda it: it.are_many(it.lost_to_scalers) and not it.faults,
    "raised": lambda it: it.oscillates and not it.faults,
    "following": lambda it: it.follows_gradients,
    "falling": lambda it: it.keeps_falling and not it.will_work,
    "faulty": lambda it: bool(it.faults),
    "settling": lambda it: True,
}
"""In the order in which they are asked."""

# The table

ENDS = {"first_scale": "first_scale", "last_scale": "last_scale", "new_lows": "new_lows"}

SKIPS: tuple[Decision[Scaling], ...] = (
    Decision(
        RESTART,
        "new scalers replace one another, and over one step in eight is skipped while a later one settles",
        lambda it: it.skips_are == "restarting",
        "{succession} scalers replace one another: {new_scaler}; {cost} of {ran} steps were skipped while later ones "
        "settled",
        {"skipped": "cost", "scalers": "succession"},
        CODES[RESTART].remedy + "[, or start with GradScaler(init_scale={lower_start:g})]",
    ),
    Decision(
        OSCILLATION,
        "over one step in eight is skipped right after the loss scale grew, and the scale does not fall",
        lambda it: it.skips_are == "raised",
        "the loss scale grows after {behind} (growth_interval={growth_interval:d}), and {cost} of {ran} steps were "
        "skipped right after that",
        {"skipped": "cost", "growth_interval": "growth_interval"},
    ),
    Decision(
        "gradient-growth",
        "at least 3 single skips after the scale settled, each finite in replays at scales up to 8 times lower",
        lambda it: it.skips_are == "following",
        "gradients grow, and the loss scale follows them from {first_scale} to {last_scale} in {new_lows:d} "
        "single skips; at lower scales replays are finite and lose no gradient",
        ENDS,
    ),
    Decision(
        UNKNOWN,
        "the loss scale keeps falling although losses are finite, and no replay shows why",
        lambda it: it.fails_by_itself and not it.to_blame,
        "gradients are not finite in {many:d} of {ran:d} steps, although the loss is; step {narrowest.step:d} narrows "
        "them down to {groups:d} of {run.groups:d} groups: {groups}",
        {"skipped": "many", "narrowest_step": "narrowest.step", "groups": "groups"},
    ),
    Decision(
        "scale-collapse",
        "the loss scale keeps falling: 3 new lows, 5 skips in a row at the end, or below 1; it follows from the root",
        lambda it: it.is_lower and scale_floor(it.steps) is None and it.fails_at_one is None,
        "the loss scale keeps falling, from {from_to}",
        ENDS,
        fields={"root": 0},
    ),
    Decision(
        CALIBRATION,
        "the script itself withholds steps, at no loss scale that is seen, and takes one of the last five: information",
        lambda it: it.skips_are == "own" and it.goes_on,
        "the script itself withheld {many:step}, whose gradients were not finite; it took others since",
        {"skipped": "many"},
        "",
        "info",
    ),
    Decision(
        UNKNOWN,
        "the script itself withholds steps, its last five among them, and no replay shows why",
        lambda it: it.skips_are == "own" and not it.goes_on,
        "the script itself withheld {many:d} of {ran:d} steps, the last among them: gradients were not finite, "
        "although the loss was",
        {"skipped": "many"},
    ),
    Decision(
        CALIBRATION,
        "every skip is at the start, right after growth, or finite at a lower scale: information",
        lambda it: it.skips_are == "settling",
        "{who} skipped {many:step} while the loss scale {settles}",
        {"skipped": "many", "scale": "settled_at", UNEXPLAINED: "unexplained", UNTOLD: "untold"},
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
    """What is known of the loss scale of each optimizer that has stepped."""
    for run in filter(attrgetter("steps"), record.timelines):
        scaled = replace(run, steps=run.scaled_steps)
        yield Scaling(scaled.steps, scaled.steps_run, run)


def skips(record: Record) -> Iterator[Finding]:
    """For each optimizer the cause of its skips, and for each scaler what follows from it, or ``scale-calibration``."""
    found: dict[tuple[str, int], Finding] = {}
    for scaling in scalings(record):
        yield from scaling.causes() if scaling.skipped else ()
        new = {(row.code, scaling.steps[-1].scaler): row.finding(scaling) for row in holding(SKIPS, scaling)}
        yield from (new[key] for key in new if key not in found)
        found |= new
