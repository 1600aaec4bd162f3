"""The op where FP16 goes wrong and FP32 does not, the code that its numbers mean, and the finding at its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampdbg.agreement import NOTHING_IN_COMMON, agrees, is_finite, keeps_its_gradients, noise_floor
from ampdbg.diagnosis.remedies import formula_of, pole_of, remedy_of
from ampdbg.formats import FLOAT16, FORMATS, FloatFormat
from ampdbg.ops import CASTS, DIVISIONS, LOGARITHMS, POLES, POLES_ELSEWHERE, ROOTS, WRITTEN_OUT, base_name
from ampdbg.quantities import number
from ampdbg.record.run import Investigation, Producer, Replay

NEAR = 0.9
"""FP16's own rounding upstream moves a value by less than a tenth: so near the limit FP32 may still be below it."""

OVERFLOWS = {"forward": "forward-overflow", "backward": "gradient-overflow"}
"""The code of an overflow, by the pass in which it starts."""

FAR_FROM_FP32, UNKNOWN = "precision-loss", "unknown"

CAST_NAMES = {"forward": "the cast to half", "backward": "the cast of a gradient to half"}

DERIVED: Mapping[frozenset[str] | None, str] = {LOGARITHMS: "a logarithm", ROOTS: "a root"}
"""What has a derivative that is a quotient, by the kind of op that a line calls."""


@dataclass(frozen=True)
class Suspect:
    """A producer of one investigated step, with what decides its code."""

    made: Investigation
    producer: Producer

    @property
    def low(self) -> Replay:
        """The replay that it belongs to."""
        return blamed_replay(self.made)

    @property
    def is_cast(self) -> bool:
        """It is nothing but a change of dtype."""
        return base_name(self.producer.op) in CASTS

    @property
    def scale(self) -> float:
        """The loss scale that its values are at: 1 in the forward pass. Where FP32's value at a scale of 1 is beyond
        the format, the op overflows at any, and may take no gradient, as of what a custom Function has saved."""
        is_at_any = not self.is_cast and (self.producer.fp32_largest or 0.0) >= self.format.overflow_threshold
        return self.low.scale if self.producer.phase == "backward" and not is_at_any else 1.0

    @property
    def value(self) -> float | None:
        """The largest magnitude that the op has in FP32 at the loss scale of the step; None where not known."""
        if self.is_cast:
            return self.producer.input_largest
        return None if self.producer.fp32_largest is None else self.producer.fp32_largest * self.scale

    @property
    def format(self) -> FloatFormat:
        """The format that it computes in."""
        return format_of(self.producer.dtype)

    @property
    def overflows(self) -> bool:
        """FP32 has a value there that the op's dtype cannot hold."""
        return self.value is not None and self.value >= NEAR * self.format.overflow_threshold

    @property
    def overflows_in_half_alone(self) -> bool:
        """Its inf, of finite numbers in the backward pass, is gone at a lower loss scale, and FP32 is no proof.

        Half precision's own forward pass may be far from FP32's, and its gradients larger.
        """
        made = self.producer
        is_inf_alone = made.inf > 0 and not (made.nan or made.divides_by_zero)
        return made.phase == "backward" and is_inf_alone and survivor(self.made) is not None

    @property
    def departs(self) -> bool:
        """It is finite and far larger than FP32's own value, so that a later op overflows."""
        made = self.producer
        return not (made.inf or made.nan) and made.distance is None and made.fp32_largest is not None

    @property
    def needs_only_a_scale(self) -> bool:
        """It goes wrong in the backward pass, and at a lower loss scale all gradients are FP32's."""
        survived = survivor(self.made) if self.producer.phase == "backward" else None
        if survived is None or not keeps_its_gradients(survived):
            return False
        return agrees(survived, self.made.reference, noise_floor(self.made))

    @property
    def is_constant(self) -> bool:
        """It overflows on a constant that the code wrote, such as a mask, its own or added to another.

        Gradients are no such thing: that of a loss is the loss scale itself.
        """
        return self.producer.is_constant and self.producer.phase == "forward"

    @property
    def leaf(self) -> str | None:
        """The batch's leaf that it casts, where it is the cast of the batch itself and FP16 cannot hold that."""
        largest = self.made.batch_largest if self.is_cast and self.producer.phase == "forward" else {}
        alike = [name for name, value in largest.items() if value == self.producer.input_largest]
        names = alike if self.producer.leaf is None else [self.producer.leaf]
        return next((name for name in names if largest.get(name, 0.0) >= self.format.overflow_threshold), None)

    @property
    def is_flushed(self) -> bool:
        """It has a pole, or divides by a zero, and FP32 keeps away from there. At a pole no loss scale helps."""
        if self.producer.finite_in_fp32 is not True:
            return False
        in_range = self.value is not None and not self.overflows
        at_a_pole = in_range and base_name(self.producer.op) in POLES and not self.needs_only_a_scale
        return self.producer.divides_by_zero or at_a_pole

    @property
    def is_below_zero(self) -> bool:
        """Whether it is NaN for the root of a number that half alone has below zero."""
        made = self.producer
        return made.nan > 0 and made.finite_in_fp32 is True and base_name(made.op) in ROOTS

    # In words

    @property
    def name(self) -> str:
        """The op and its module."""
        return named(self.producer)

    @property
    def bare_name(self) -> str:
        """The op alone."""
        return op_name(self.producer.op)

    @property
    def limit(self) -> str:
        """Where its format ends."""
        return limit_of(self.format)

    @property
    def constant(self) -> float:
        """The magnitude of the constant that it overflows on."""
        return self.producer.input_largest or self.value or 0.0

    @property
    def in_batch(self) -> str:
        """What the batch holds that half cannot, and where."""
        return in_batch(self.made, self.leaf or "")

    @property
    def magnitude(self) -> str:
        """Its value in FP32, with the loss scale that it is at; "" where that is not known."""
        at = "" if self.scale == 1.0 else f" at a loss scale of {number(self.scale)}"
        return "" if self.value is None else f"{number(self.value)}{at}"

    @property
    def reaches(self) -> str:
        """Where it overflows, how far FP32 goes there, and where its format ends."""
        reach = f"has inputs of up to {self.magnitude}" if self.is_cast else f"reaches {self.magnitude} in FP32"
        is_above = self.value is not None and self.value > self.format.largest
        return f"{self.name} {reach}, {'above' if is_above else 'next to'} {self.limit}"

    @property
    def departed(self) -> str:
        """That it is finite, and far larger than FP32's own value."""
        reached = number(self.producer.output_largest)
        return f"{self.name} reaches {reached} where FP32 has {self.magnitude}, and a later op overflows"

    @property
    def takes(self) -> str:
        """What it does with the value that half has rounded."""
        made, name = self.producer, base_name(self.producer.op)
        is_quotient = made.phase == "backward" and name in DIVISIONS
        pole = pole_of(made) or DERIVED.get(formula_of(made) if is_quotient else None, "")
        if pole:
            return "is given" if pole == name else f"makes the derivative of {pole} at"
        return "takes the logarithm of" if name in LOGARITHMS else "divides by"

    @property
    def takes_a_pole(self) -> str:
        """What it does with the value that half has rounded to where the op is infinite."""
        return self.takes_a_pole_in(format_of(self.low.dtype).short)

    def takes_a_pole_in(self, short: str) -> str:
        """The same of a format."""
        at = " or ".join(map(number, POLES_ELSEWHERE.get(pole_of(self.producer), ()))) or "zero"
        return f"{self.takes} a value that {short} rounds to {at}"


def suspects(made: Investigation) -> list[Suspect]:
    """The ops that go wrong in FP16, those behind a NaN loss first; what FP32 shows too is meant to be.

    What is erased before any gradient has it is none.
    """
    return [suspect for suspect in _unlike_fp32(made) if not suspect.producer.is_erased]


def overflow_in(made: Investigation, *, erased: bool = False) -> Suspect | None:
    """The first op that FP32 shows to be beyond the range, or the first of those ``erased`` before any gradient has
    them; a constant, such as a mask, is meant to be there."""
    known = (one for one in _unlike_fp32(made) if one.producer.is_erased is erased)
    return next((one for one in known if one.overflows and not one.is_constant), None)


def _unlike_fp32(made: Investigation) -> list[Suspect]:
    found = blamed_replay(made).producers
    return [Suspect(made, producer) for producer in found if producer.finite_in_fp32 is not False]


def blamed_replay(made: Investigation) -> Replay:
    """The replay whose producers explain the step: that at its own loss scale, or where no lower one is finite either
    that at the lowest, for what overflows at the first may fit there."""
    lower = (replay for replay in made.at_lower if replay.producers)
    return made.low if survivor(made) else next(lower, made.low)


def culprit(made: Investigation) -> Suspect | None:
    """The suspect that explains the step. Constants are mostly masks: one is blamed when nothing else can be.

    Where gradients are finite at a lower scale, the backward pass overflows, unless some are zero there or they have
    nothing in common with FP32's: then what overflows in the forward pass is behind them too. Where they are finite at
    none, an op counts whose inf or NaN has reached them; what a matcher computes without gradients has not.
    """
    survived = survivor(made)
    is_sound = survived and not survived.lost and (survived.gradient_distance or 0.0) < NOTHING_IN_COMMON
    phases = ("forward",) if made.why == "loss" else ("backward",) if is_sound else ("forward", "backward")
    found = (suspect for suspect in suspects(made) if suspect.producer.phase in phases)
    is_of_any = made.why == "loss" or survived is not None

    def order(one: Suspect) -> tuple[bool, bool]:
        return not (is_of_any or one.producer.reaches_gradients), one.is_constant

    return min(found, key=order, default=None)


def survivor(made: Investigation) -> Replay | None:
    """The replay at the highest of the lower loss scales that were tried at which everything is finite."""
    return next(filter(is_finite, made.at_lower), None)


def format_of(dtype: str) -> FloatFormat:
    """The format of a replay or of an op in it; FP16 where it is one of another version."""
    return FORMATS.get(dtype, FLOAT16)


def in_batch(made: Investigation, leaf: str) -> str:
    """The largest value of a leaf of the batch, and where it stands, as messages say it."""
    index = made.batch_index.get(leaf, ())
    where = f" in sample {index[0]}" if index else ""
    return f"{number(made.batch_largest[leaf])}{where} of {leaf or 'its tensor'}"


def placed(made: Investigation, code: str, at: Producer | None) -> dict[str, Any]:
    """The fields of a finding that starts at a producer: step, phase, module, op, parameter, line, and its remedy."""
    if at is None:
        phase = "backward" if made.why == "gradients" else "forward"
        return {"step": made.step, "phase": phase, "remedy": remedy_of(code, at)}
    fields = {name: getattr(at, name) for name in ("phase", "module", "op", "parameter", "source")}
    return {"step": made.step, "remedy": remedy_of(code, at), **fields}


def named(producer: Producer) -> str:
    """The op and its module, as messages name them; few know what a cast is called."""
    is_cast = producer.op.startswith("aten._to_copy")
    what = CAST_NAMES.get(producer.phase, producer.op) if is_cast else op_name(producer.op)
    if base_name(producer.op) in WRITTEN_OUT:
        what = "the code"
    return f"{what} in {producer.module}" if producer.module else what


def op_name(op: str) -> str:
    """``aten._softmax.default`` is known as ``softmax``."""
    return base_name(op).lstrip("_")


def limit_of(fmt: FloatFormat) -> str:
    """Where a format ends, as messages say it."""
    return f"{fmt.short}'s limit of {number(fmt.largest)}"
