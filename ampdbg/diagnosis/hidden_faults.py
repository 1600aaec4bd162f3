"""Faults in steps with finite loss and gradients: overflow that erases itself, lost gradients, lost precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ampdbg.agreement import (
    AGREEMENT,
    GRADIENT_AGREEMENT,
    LOST_ENERGY,
    NOISE_FLOORS,
    agrees,
    gradient_noise,
    is_beyond_noise,
    is_comparable,
    losses_agree,
    noise_floor,
)
from ampdbg.diagnosis.cause import Evidence
from ampdbg.diagnosis.decisions import Decision, fact, holding
from ampdbg.diagnosis.producers import FAR_FROM_FP32, Suspect, named, overflow_in, placed
from ampdbg.diagnosis.scale import GROWTH
from ampdbg.formats import FLOAT16
from ampdbg.levels import has_static_scale
from ampdbg.quantities import percent
from ampdbg.record.codes import CODES
from ampdbg.record.findings import place_of
from ampdbg.record.run import Record

STARTS_LOW = (
    "make the loss larger, or start the scaler higher, as with GradScaler(init_scale=2.0**24): by itself it "
    "doubles its scale only every growth_interval steps"
)
OF_FP16_WEIGHTS = (
    "keep the weights in float32 and run the model under autocast with a GradScaler, which cannot unscale FP16 "
    "gradients"
)
HELD_DOWN = "give each loss its own backward pass and GradScaler: at a larger scale other gradients overflow"
SILENT, UNDERFLOW, CLIPPED = "silent-overflow", "gradient-underflow", "misuse-clip-scaled"

SAME_NORM, STEPS_OF_A_NORM = 1e-3, 5
"""Gradients have the norm of a limit if it differs by at most this share over this number of steps."""

SHRUNK = 10.0
"""Gradients that a script may divide for other reasons, such as micro-batches, are smaller by less than this factor."""


@dataclass(frozen=True, eq=False)
class HiddenFault(Evidence):
    """The facts about a replayed step that looks healthy: its loss and gradients are finite, in FP32 too."""

    @property
    def is_fault(self) -> bool:
        """True if a row of the table reports a fault, and not only information."""
        return any(row.severity != "info" for row in holding(HIDDEN, self))

    @cached_property
    def is_far(self) -> bool:
        """True if the step is further from FP32 than its noise floor explains; False without a noise floor."""
        floor = noise_floor(self.made)
        return floor is not None and not agrees(self.low, self.made.reference, floor)

    @cached_property
    def is_off(self) -> bool:
        """True if the step agrees with FP32, but its gradients differ by more than rounded weights explain."""
        return not self.is_far and is_beyond_noise(self.low, noise_floor(self.made))

    @property
    def beyond_noise(self) -> str:
        """The distance of the gradients from FP32's, in words."""
        distance, noise = (one.gradient_distance or math.inf for one in (self.low, self.made.floor or self.low))
        by_rounding = f", and rounding weights alone moves them by {percent(noise)}" if noise < math.inf else ""
        return f"{percent(distance)} from FP32's{by_rounding}"

    @cached_property
    def hidden(self) -> Suspect | None:
        """The op that overflows although loss and gradients are finite, or None."""
        return overflow_in(self.made)

    @cached_property
    def erased(self) -> Suspect | None:
        """The op that overflows without an effect, because FP32 has a zero there too, as after a ReLU; or None."""
        if self.hidden is None:
            return overflow_in(self.made, erased=True)
        distance = math.inf if self.low.gradient_distance is None else self.low.gradient_distance
        is_harmless = self.hidden.producer.phase == "backward" and distance <= AGREEMENT and not self.is_far
        return self.hidden if is_harmless else None

    @property
    def is_hidden_well(self) -> bool:
        """True if an op overflows and the step as a whole agrees with FP32."""
        return self.hidden is not None and self.erased is None and not self.is_far

    @property
    def is_flushed(self) -> bool:
        """True if a relevant share of the gradient is zero, or if only zeros explain the distance from FP32."""
        is_all = self.is_far and self.hidden is None and bool(self.low.lost)
        return self.lost_energy > LOST_ENERGY or is_all

    @property
    def departs(self) -> bool:
        """True if the step is far from FP32 or chooses differently, and neither rounding nor a known cause explains
        it."""
        is_led = self.is_far or self.is_off or self.made.choice is not None
        return is_led and self.hidden is None and not self.is_flushed and not self.made.rounded_angles

    @cached_property
    def limit(self) -> float | None:
        """The norm to which the script itself limits gradients that carry the loss scale, or None.

        The norm of scaled gradients is then the same in each step, and the step's own gradients are far larger.
        Gradients that ``unscale_`` divides are measured there, before a limit.
        """
        steps = (one for one in self.run.steps if one.scaler and one.step <= self.made.step)
        norms = [one.grad_norm * one.scale for one in steps if one.grad_norm][-STEPS_OF_A_NORM:]
        is_same = len(norms) == STEPS_OF_A_NORM and max(norms) <= (1.0 + SAME_NORM) * min(norms)
        is_shrunk = is_same and self.low.grad_norm * self.low.scale >= SHRUNK * norms[-1]
        return norms[-1] if is_shrunk else None

    @property
    def has_rounded_angles(self) -> bool:
        """True if half computes a sine or cosine of wrong angles, and nothing overflows."""
        return bool(self.made.rounded_angles) and self.hidden is None

    @property
    def angular(self) -> Suspect:
        """The sine or cosine with the largest distance from FP32."""
        return Suspect(self.made, self.made.rounded_angles[0])

    @property
    def others_angular(self) -> int | None:
        """The number of further such ops, or None."""
        return len(self.made.rounded_angles) - 1 or None

    @property
    def apart(self) -> float:
        """The spacing of the angles' half format at the largest of them, in radians."""
        return self.angular.format.spacing_at(self.angular.producer.input_largest)

    @property
    def chooses_otherwise(self) -> bool:
        """True if an op chooses differently than in FP32, such as the box for an object, and the loss agrees. A loss
        counts as agreeing where rounding the weights alone moves the gradients far, and no less than half does."""
        floor, distance = noise_floor(self.made), self.low.gradient_distance or 0.0
        noise = gradient_noise(floor)
        is_noise = noise > GRADIENT_AGREEMENT and distance <= NOISE_FLOORS * noise
        return self.made.choice is not None and (is_noise or losses_agree(self.low, self.made.reference, floor))

    @property
    def lost_energy(self) -> float:
        """The share of the gradient's sum of squares that half flushes to zero."""
        return self.low.lost_energy or 0.0

    @property
    def repair(self) -> str:
        """The advice for raising the loss scale. A dynamic scale either started low or is held down. It is held down
        if steps were skipped at the next larger scale, because some gradients overflow there."""
        scaled = [step for step in self.run.steps if step.scaler]
        if has_static_scale(self.run.config) or not scaled:
            return OF_FP16_WEIGHTS if FLOAT16.name in self.run.half_weights else CODES[UNDERFLOW].remedy
        skipped = [step.scale for step in scaled if step.skipped and math.isfinite(step.loss)]
        is_held_down = any(self.low.scale < scale <= GROWTH * self.low.scale for scale in skipped)
        return HELD_DOWN if is_held_down else STARTS_LOW

    @property
    def first_far(self) -> str:
        """The first op that is far from FP32, in words."""
        first, choice = self.made.first_far, self.made.choice
        if choice is None:
            return f"{named(first)} is the first op that differs" if first else ""
        at = f" at {place_of(choice.source)}" if choice.source else ""
        decides = f", for {named(first)} decides which" if first and first != choice else ""
        return f"{named(choice)}{at} takes other elements than in FP32{decides}"

    @property
    def suspect(self) -> Suspect | None:
        """The op that overflows, hidden or erased."""
        return self.hidden or self.erased

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The losses, the distance of the gradients from FP32, and the FP32 value of the op that overflows."""
        return {
            "loss": self.low.loss,
            "loss_in_fp32": self.made.reference.loss,
            "gradient_distance": self.low.gradient_distance,
            "value": fact(self, "suspect.value"),
        }

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """Return the place of the op that overflows, or of the first op that is far from FP32."""
        far = self.angular.producer if self.has_rounded_angles else self.made.first_far
        at = {SILENT: fact(self, "suspect.producer"), FAR_FROM_FP32: far}.get(row.code)
        return placed(self.made, row.code, at)


BOTH_LOSSES = "the loss is {low.loss}, and {made.reference.loss} in FP32"
FIRST_FAR = "[; {first_far}]"
ANGLES = (
    "{angular.name} takes angles up to {angular.producer.input_largest}, where "
    "{angular.format.short}'s numbers are {apart} apart; "
    "its result is {angular.producer.distance:percent} from FP32's[, and {others_angular:other such op} too]"
)
OF_ANGLES = (
    "make these angles in float32 with autocast disabled, of positions in float32; cast only their sine and cosine"
)

HIDDEN: tuple[Decision[HiddenFault], ...] = (
    Decision(
        CLIPPED,
        "scaled gradients have the same norm in each step, and the step's own are at least 10 times as large",
        lambda fault: fault.limit is not None,
        "the script limits gradients that carry the loss scale: their norm is {limit} in each step; divided by "
        "{low.scale}, it is far below the step's own {low.grad_norm}",
    ),
    Decision(
        SILENT,
        "an op overflows FP16's limit, everything after it is finite, and the step is far from FP32",
        lambda fault: fault.hidden is not None and fault.is_far,
        "{suspect.reaches}, and a later op turns the inf into a finite value; " + BOTH_LOSSES,
    ),
    Decision(
        SILENT,
        "the same in a step that agrees with FP32, while parameters lose most of their gradient",
        lambda fault: fault.is_hidden_well and bool(fault.low.lost),
        "{suspect.reaches}, and a later op turns the inf into a finite value; the loss still agrees with FP32's, and "
        "the gradient of {low.lost} is lost",
    ),
    Decision(
        SILENT,
        "the same where no parameter does: a warning",
        lambda fault: fault.is_hidden_well and not fault.low.lost,
        "{suspect.reaches}, and a later op turns the inf into a finite value; the loss still agrees with FP32's",
        severity="warning",
    ),
    Decision(
        SILENT,
        "a gradient overflows, and is zero in FP32 too: information",
        lambda fault: fault.erased is not None,
        "{suspect.reaches}, and a later op turns the inf into the zero that FP32 has",
        remedy="",
        severity="info",
    ),
    Decision(
        UNDERFLOW,
        "over a tenth of the gradient's energy is zero in half and not in FP32",
        lambda fault: fault.is_flushed,
        "at a loss scale of {low.scale}, {half} flushes {lost_energy:.0%} of the gradient's energy to zero",
        {"loss_scale": "low.scale", "lost_energy": "lost_energy", "lost": "low.lost"},
        "{repair}",
    ),
    Decision(
        FAR_FROM_FP32,
        "a sine or cosine takes angles that half has only at steps of half a radian or more, and is over 10 % from "
        "FP32's; the step is far from FP32 too",
        lambda fault: fault.has_rounded_angles and fault.is_far,
        ANGLES + "; " + BOTH_LOSSES,
        remedy=OF_ANGLES,
    ),
    Decision(
        FAR_FROM_FP32,
        "the same in a step that agrees with FP32: a warning",
        lambda fault: fault.has_rounded_angles and not fault.is_far,
        ANGLES + "; the loss agrees[, and gradients are {low.gradient_distance:percent} from FP32's]",
        remedy=OF_ANGLES,
        severity="warning",
    ),
    Decision(
        FAR_FROM_FP32,
        "nothing overflows, but the loss is over 5 % or gradients over 25 % from FP32's: over 4 times what "
        "rounding weights changes",
        lambda fault: fault.departs and fault.is_far and not fault.chooses_otherwise,
        "the step differs from FP32 by more than rounding explains: " + BOTH_LOSSES + FIRST_FAR,
    ),
    Decision(
        FAR_FROM_FP32,
        "the loss agrees, and gradients are over 10 % from FP32's, over 16 times what rounding weights changes: a "
        "warning",
        lambda fault: fault.departs and fault.is_off and not fault.chooses_otherwise,
        "the gradients are {beyond_noise}, though the loss agrees" + FIRST_FAR,
        severity="warning",
    ),
    Decision(
        FAR_FROM_FP32,
        "an op takes other elements than in FP32, and the loss agrees, or rounding weights leads as far: information",
        lambda fault: fault.departs and fault.chooses_otherwise,
        "the gradients are {beyond_noise}" + FIRST_FAR,
        remedy="none where the other choice is as good; else run the op that decides it in FP32",
        severity="info",
    ),
)


def hidden_faults(record: Record) -> Iterator[HiddenFault]:
    """Yield the replayed steps that looked healthy. Steps are omitted if a learning rate has driven losses or
    weights far off. Half precision is not at fault there."""
    made = (HiddenFault(one, run) for run in record.timelines for one in run.investigations if is_comparable(one))
    return (one for one in made if not one.has_grown_or_risen)
