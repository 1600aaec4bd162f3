"""The op that fails in FP16 and not in FP32, the finding code for its numbers, and its place. A producer is an op
where inf or NaN starts. A suspect is a producer that may explain a failing step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampdbg.agreement import NOISE_LIMIT, agrees, is_finite, keeps_its_gradients, noise_floor
from ampdbg.diagnosis.remedies import formula_of, pole_of, remedy_of
from ampdbg.formats import FLOAT16, FORMATS, FloatFormat
from ampdbg.ops import CASTS, CODE_CONSTANTS, DIVISIONS, LOGARITHMS, POLES, POLES_ELSEWHERE, ROOTS, base_name
from ampdbg.quantities import in_module, number
from ampdbg.record.run import Investigation, Producer, Replay

NEAR = 0.9
"""Share of the limit that counts as overflow in FP32: earlier FP16 rounding changes a value by less than a tenth."""

OVERFLOWS = {"forward": "forward-overflow", "backward": "gradient-overflow"}
"""The code of an overflow by the pass in which it starts."""

FAR_FROM_FP32, UNKNOWN = "precision-loss", "unknown"

CAST_NAMES = {"forward": "the cast to half", "backward": "the cast of a gradient to half"}

DERIVED: Mapping[frozenset[str] | None, str] = {LOGARITHMS: "a logarithm", ROOTS: "a root"}
"""Ops with a quotient as derivative, in words."""


@dataclass(frozen=True)
class Suspect:
    """A producer of one investigated step, and the facts that decide its finding code."""

    made: Investigation
    producer: Producer

    @property
    def low(self) -> Replay:
        """The replay that contains the producer."""
        return blamed_replay(self.made)

    @property
    def is_cast(self) -> bool:
        """True if the op only changes the dtype."""
        return base_name(self.producer.op) in CASTS

    @property
    def scale(self) -> float:
        """The loss scale of the op's values; 1 in the forward pass. It is also 1 if FP32's value at a scale of 1
        exceeds the format. The op then overflows at any scale. It may read no gradient, but a tensor that a custom
        Function saved."""
        is_at_any = not self.is_cast and (self.producer.fp32_largest or 0.0) >= self.format.overflow_threshold
        return self.low.scale if self.producer.phase == "backward" and not is_at_any else 1.0

    @property
    def value(self) -> float | None:
        """The op's largest magnitude in FP32 at the step's loss scale, or None. A cast has the magnitude of its
        input."""
        if self.is_cast:
            return self.producer.input_largest
        return None if self.producer.fp32_largest is None else self.producer.fp32_largest * self.scale

    @property
    def format(self) -> FloatFormat:
        return format_of(self.producer.dtype)

    @property
    def overflows(self) -> bool:
        """True if FP32 has a value that the op's dtype cannot hold."""
        return self.value is not None and self.value >= NEAR * self.format.overflow_threshold

    @property
    def overflows_in_half_alone(self) -> bool:
        """True for inf in the backward pass that a lower loss scale removes, regardless of FP32. The half forward
        pass may be far from FP32's, and its gradients larger."""
        made = self.producer
        is_inf_alone = made.inf > 0 and not (made.nan or made.divides_by_zero)
        return made.phase == "backward" and is_inf_alone and survivor(self.made) is not None

    @property
    def departs(self) -> bool:
        """True if the op is finite and far larger than in FP32, so that a later op overflows."""
        made = self.producer
        return not (made.inf or made.nan) and made.distance is None and made.fp32_largest is not None

    @property
    def needs_only_a_scale(self) -> bool:
        """True if the op fails in the backward pass, and all gradients agree with FP32 at a lower loss scale."""
        survived = survivor(self.made) if self.producer.phase == "backward" else None
        if survived is None or not keeps_its_gradients(survived):
            return False
        return agrees(survived, self.made.reference, noise_floor(self.made))

    @property
    def is_constant(self) -> bool:
        """True if the op overflows on a constant of the code, or a sum of constants. An example is a mask. A
        gradient does not count: the gradient of a loss is the loss scale itself."""
        return self.producer.is_constant and self.producer.phase == "forward"

    @property
    def leaf(self) -> str | None:
        """The batch leaf, if the op casts the batch itself and FP16 cannot hold the leaf; else None."""
        largest = self.made.batch_largest if self.is_cast and self.producer.phase == "forward" else {}
        alike = [name for name, value in largest.items() if value == self.producer.input_largest]
        names = alike if self.producer.leaf is None else [self.producer.leaf]
        return next((name for name in names if largest.get(name, 0.0) >= self.format.overflow_threshold), None)

    @property
    def is_flushed(self) -> bool:
        """True if the op is at a pole or divides by zero only in half. No loss scale helps at a pole."""
        if self.producer.finite_in_fp32 is not True:
            return False
        in_range = self.value is not None and not self.overflows
        at_a_pole = in_range and base_name(self.producer.op) in POLES and not self.needs_only_a_scale
        return self.producer.divides_by_zero or at_a_pole

    @property
    def is_below_zero(self) -> bool:
        """True if the op is NaN, because its argument of a root is negative in half and not in FP32."""
        made = self.producer
        return made.nan > 0 and made.finite_in_fp32 is True and base_name(made.op) in ROOTS

    @property
    def is_left_nothing(self) -> bool:
        """True if the op divides zero by zero where FP32 has other values: what it takes was lost before it."""
        made = self.producer
        return made.divides_by_zero and made.nan > 0 and made.input_largest == 0.0 and bool(made.fp32_largest)

    @property
    def is_explained(self) -> bool:
        """True if the op's numbers show why it fails; a constant, such as a mask, explains nothing."""
        shown = self.overflows, self.overflows_in_half_alone, self.departs, self.is_flushed, self.is_below_zero
        return any(shown) and not self.is_constant

    # Text of messages

    @property
    def name(self) -> str:
        return named(self.producer)

    @property
    def bare_name(self) -> str:
        return op_name(self.producer.op)

    @property
    def limit(self) -> str:
        return limit_of(self.format)

    @property
    def constant(self) -> float:
        """The magnitude of the constant that overflows."""
        return self.producer.input_largest or self.value or 0.0

    @property
    def in_batch(self) -> str:
        """The value in the batch that half cannot hold, and its position."""
        return in_batch(self.made, self.leaf or "")

    @property
    def magnitude(self) -> str:
        """The op's FP32 value with the loss scale; "" if unknown."""
        at = "" if self.scale == 1.0 else f" at a loss scale of {number(self.scale)}"
        return "" if self.value is None else f"{number(self.value)}{at}"

    @property
    def reaches(self) -> str:
        """The op, its FP32 value, and the limit of its format."""
        reach = f"has inputs of up to {self.magnitude}" if self.is_cast else f"reaches {self.magnitude} in FP32"
        is_above = self.value is not None and self.value > self.format.largest
        return f"{self.name} {reach}, {'above' if is_above else 'next to'} {self.limit}"

    @property
    def departed(self) -> str:
        """The description of a finite value that is far larger than in FP32."""
        reached = number(self.producer.output_largest)
        return f"{self.name} reaches {reached} where FP32 has {self.magnitude}, and a later op overflows"

    @property
    def takes(self) -> str:
        """The verb for the op and a value that half has rounded."""
        made, name = self.producer, base_name(self.producer.op)
        is_quotient = made.phase == "backward" and name in DIVISIONS
        pole = pole_of(made) or DERIVED.get(formula_of(made) if is_quotient else None, "")
        if pole:
            return "is given" if pole == name else f"makes the derivative of {pole} at"
        return "takes the logarithm of" if name in LOGARITHMS else "divides by"

    @property
    def takes_a_pole(self) -> str:
        """The op and the pole to which the half format rounds its argument."""
        return self.takes_a_pole_in(format_of(self.low.dtype).short)

    def takes_a_pole_in(self, short: str) -> str:
        """Return the same for a given format."""
        at = " or ".join(map(number, POLES_ELSEWHERE.get(pole_of(self.producer), ()))) or "zero"
        return f"{self.takes} a value that {short} rounds to {at}"


def suspects(made: Investigation) -> list[Suspect]:
    """Return the ops that fail in FP16, ops that explain a NaN loss first. Failures that FP32 shows too are
    intended. An op is excluded if no gradient depends on its inf or NaN."""
    return [suspect for suspect in _unlike_fp32(made) if not suspect.producer.is_erased]


def overflow_in(made: Investigation, *, erased: bool = False) -> Suspect | None:
    """Return the first op with an FP32 value beyond its format, or the first ``erased`` one. An erased overflow
    changes no gradient. Constants, such as masks, are intended and excluded."""
    known = (one for one in _unlike_fp32(made) if one.producer.is_erased is erased)
    return next((one for one in known if one.overflows and not one.is_constant), None)


def _unlike_fp32(made: Investigation) -> list[Suspect]:
    found = blamed_replay(made).producers
    return [Suspect(made, producer) for producer in found if producer.finite_in_fp32 is not False]


def blamed_replay(made: Investigation) -> Replay:
    """Return the replay with the producers that explain the step: the one at the step's own loss scale. If no lower
    scale is finite either, return the one at the lowest scale. Overflows from the higher scale may be absent there."""
    lower = (replay for replay in made.at_lower if replay.producers)
    return made.low if survivor(made) else next(lower, made.low)


def culprit(made: Investigation) -> Suspect | None:
    """Return the suspect that explains the step, or None. A constant is usually a mask, and is chosen last.

    If gradients are finite at a lower scale, the backward pass overflows. The forward pass is examined too if some are
    zero there, or have nothing in common with FP32's. If gradients are finite at no scale, prefer an op that its own
    numbers explain. The next choice is one with inf or NaN that reaches them: a matcher has no gradients. An overflow
    is preferred to a division by the zeros that it leaves behind. A norm that divides by inf is an example.
    """
    survived = survivor(made)
    is_sound = survived and not survived.lost and (survived.gradient_distance or 0.0) < NOISE_LIMIT
    phases = ("forward",) if made.why == "loss" else ("backward",) if is_sound else ("forward", "backward")
    found = [suspect for suspect in suspects(made) if suspect.producer.phase in phases]
    overflow = any(one.overflows and not one.is_constant for one in found if one.producer.phase == "forward")
    is_of_any = made.why == "loss" or survived is not None

    def order(one: Suspect) -> tuple[bool, bool, bool, bool]:
        reaches, explained = (is_of_any or how for how in (one.producer.reaches_gradients, one.is_explained))
        return not explained, not reaches, overflow and one.is_left_nothing, one.is_constant

    return min(found, key=order, default=None)


def survivor(made: Investigation) -> Replay | None:
    """Return the replay at the highest lower loss scale at which everything is finite, or None."""
    return next(filter(is_finite, made.at_lower), None)


def format_of(dtype: str) -> FloatFormat:
    """Return the format of a replay or an op. Formats of another version count as FP16."""
    return FORMATS.get(dtype, FLOAT16)


def in_batch(made: Investigation, leaf: str) -> str:
    """Return the largest value of a batch leaf and its position, as messages write it."""
    index = made.batch_index.get(leaf, ())
    where = f" in sample {index[0]}" if index else ""
    return f"{number(made.batch_largest[leaf])}{where} of {leaf or 'its tensor'}"


def placed(made: Investigation, code: str, at: Producer | None) -> dict[str, Any]:
    """Return the fields of a finding at a producer: step, phase, module, op, parameter, line and remedy."""
    if at is None:
        phase = "backward" if made.why == "gradients" else "forward"
        return {"step": made.step, "phase": phase, "remedy": remedy_of(code, at)}
    fields = {name: getattr(at, name) for name in ("phase", "module", "op", "parameter", "source")}
    return {"step": made.step, "remedy": remedy_of(code, at), **fields}


def named(producer: Producer) -> str:
    """Return the op and its module, as messages name them. Casts are described, because their op name is little
    known."""
    is_cast = producer.op.startswith("aten._to_copy")
    what = CAST_NAMES.get(producer.phase, producer.op) if is_cast else op_name(producer.op)
    if base_name(producer.op) in CODE_CONSTANTS:
        what = "the code"
    return what + in_module(producer.module)


def op_name(op: str) -> str:
    """Return the common name of an op: ``softmax`` for ``aten._softmax.default``."""
    return base_name(op).lstrip("_")


def limit_of(fmt: FloatFormat) -> str:
    """Return the limit of a format, as messages write it."""
    return f"{fmt.short}'s limit of {number(fmt.largest)}"
