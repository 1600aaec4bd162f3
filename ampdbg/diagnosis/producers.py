"""The op where FP16 goes wrong and FP32 does not, the code that its numbers mean, and the finding at its line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ampdbg.agreement import agrees, is_finite, keeps_its_gradients, noise_floor
from ampdbg.diagnosis.remedies import remedy_of
from ampdbg.formats import FLOAT16, FORMATS, FloatFormat
from ampdbg.ops import CASTS, LOGARITHMS, POLES, POLES_ELSEWHERE, WRITTEN_OUT, base_name
from ampdbg.quantities import number
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import Investigation, Producer, Replay

NEAR = 0.9
"""FP16's own rounding upstream moves a value by less than a tenth: so near the limit FP32 may still be below it."""

OVERFLOWS = {"forward": "forward-overflow", "backward": "gradient-overflow"}
"""The code of an overflow, by the pass in which it starts."""

FAR_FROM_FP32, UNKNOWN = "precision-loss", "unknown"

CAST_NAMES = {"forward": "the cast to half", "backward": "the cast of a gradient to half"}


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
        """Whether it is nothing but a change of dtype."""
        return base_name(self.producer.op) in CASTS

    @property
    def value(self) -> float | None:
        """The largest magnitude that the op has in FP32 at the loss scale of the step; None where not known."""
        if self.is_cast:
            return self.producer.input_largest
        if self.producer.fp32_largest is None:
            return None
        return self.producer.fp32_largest * (self.low.scale if self.producer.phase == "backward" else 1.0)

    @property
    def format(self) -> FloatFormat:
        """The format that it computes in."""
        return format_of(self.producer.dtype)

    @property
    def overflows(self) -> bool:
        """Whether FP32 has a value there that the op's dtype cannot hold."""
        return self.value is not None and self.value >= NEAR * self.format.overflow_threshold

    @property
    def overflows_in_half_alone(self) -> bool:
        """Whether its inf, of finite numbers in the backward pass, is gone at a lower loss scale, and FP32 is no proof.

        Half precision's own forward pass may be far from FP32's, and its gradients larger.
        """
        made = self.producer
        is_inf_alone = made.inf > 0 and not (made.nan or made.divides_by_zero)
        return made.phase == "backward" and is_inf_alone and survivor(self.made) is not None

    @property
    def departs(self) -> bool:
        """Whether it is finite and far larger than FP32's own value, so that a later op overflows."""
        made = self.producer
        return not (made.inf or made.nan) and made.distance is None and made.fp32_largest is not None

    @property
    def is_pole(self) -> bool:
        """Whether it has a pole, and FP32 keeps away from it. At a pole no loss scale helps."""
        in_range = self.value is not None and not self.overflows
        is_near = base_name(self.producer.op) in POLES and self.producer.finite_in_fp32 is True
        return in_range and is_near and not self.needs_only_a_scale

    @property
    def needs_only_a_scale(self) -> bool:
        """Whether it goes wrong in the backward pass, and at a lower loss scale all gradients are FP32's."""
        survived = survivor(self.made) if self.producer.phase == "backward" else None
        fp32 = self.made.fp32
        if survived is None or fp32 is None or not keeps_its_gradients(survived):
            return False
        return agrees(survived, fp32, noise_floor(self.made))

    @property
    def is_constant(self) -> bool:
        """Whether it overflows on a constant that the code wrote, such as a mask, its own or added to another.

        Gradients are no such thing: that of a loss is the loss scale itself.
        """
        return self.producer.is_constant and self.producer.phase == "forward"

    @property
    def leaf(self) -> str | None:
        """The batch's leaf that it casts, where it is the cast of the batch itself and FP16 cannot hold that."""
        largest = self.made.batch_largest
        may_be = self.is_cast and self.producer.phase == "forward"
        found = [name for name in largest if may_be and largest[name] == self.producer.input_largest]
        names = found if self.producer.leaf is None else [self.producer.leaf]
        return next((name for name in names if largest.get(name, 0.0) >= self.format.overflow_threshold), None)

    @property
    def divides_by_flushed(self) -> bool:
        """Whether it divides by a zero that is none in FP32, where it is finite."""
        return self.producer.divides_by_zero and self.producer.finite_in_fp32 is True


NOTHING_IN_COMMON = 1.0
"""Gradients whose distance from FP32's is FP32's own norm: zeros are as near."""


def suspects(made: Investigation) -> list[Suspect]:
    """The ops that go wrong in FP16, those behind a NaN loss first; what FP32 shows too is meant to be.

    What is erased before any gradient has it is none.
    """
    return [suspect for suspect in _unlike_fp32(made) if not suspect.producer.is_erased]


def overflow_in(made: Investigation) -> Suspect | None:
    """The first suspect that FP32 shows to be beyond the range; a constant, such as a mask, is meant to be there."""
    return _first_beyond(suspects(made))


def erased_in(made: Investigation) -> Suspect | None:
    """The first overflow that no gradient has anything of."""
    return _first_beyond(suspect for suspect in _unlike_fp32(made) if suspect.producer.is_erased)


def _unlike_fp32(made: Investigation) -> list[Suspect]:
    found = blamed_replay(made).producers
    return [Suspect(made, producer) for producer in found if producer.finite_in_fp32 is not False]


def blamed_replay(made: Investigation) -> Replay:
    """The replay whose producers explain the step: that at its own loss scale, or where no lower one is finite either
    that at the lowest, for what overflows at the first may fit there."""
    lower = (replay for replay in made.at_lower if replay.producers)
    return made.low if survivor(made) else next(lower, made.low)


def _first_beyond(found: Iterable[Suspect]) -> Suspect | None:
    return next((suspect for suspect in found if suspect.overflows and not suspect.is_constant), None)


def culprit(made: Investigation) -> Suspect | None:
    """The suspect that explains the step. Constants are mostly masks: one is blamed when nothing else can be.

    Where gradients are finite at a lower scale, the backward pass overflows, unless some are zero there or they have
    nothing in common with FP32's: then what overflows in the forward pass is behind them too. Where they are finite at
    none, an op counts whose inf or NaN has reached them; what a matcher computes without gradients has not.
    """
    survived = survivor(made)
    is_sound = survived and not survived.lost and (survived.gradient_distance or 0.0) < NOTHING_IN_COMMON
    phases = ("forward",) if made.why == "loss" else ("backward",) if is_sound else ("forward", "backward")
    found = [suspect for suspect in suspects(made) if suspect.producer.phase in phases]
    if made.why == "gradients" and survived is None:
        found = [suspect for suspect in found if suspect.producer.reaches_gradients] or found
    return next((suspect for suspect in found if not suspect.is_constant), next(iter(found), None))


def survivor(made: Investigation) -> Replay | None:
    """The replay at the highest of the lower loss scales that were tried at which everything is finite."""
    return next(filter(is_finite, made.at_lower), None)


def format_of(dtype: str) -> FloatFormat:
    """The format of a replay or of an op in it; FP16 where it is one of another version."""
    return FORMATS.get(dtype, FLOAT16)


def _flushed(suspect: Suspect) -> str:
    if suspect.divides_by_flushed or not suspect.departs:
        return f"{named(suspect.producer)} {takes_a_pole(suspect)} and FP32 does not"
    return f"{_departed(suspect)}: it {_takes(suspect)} a value that half precision has rounded to almost nothing"


def _beyond_range(suspect: Suspect) -> str:
    leaf = suspect.leaf or ""
    index = suspect.made.batch_index.get(leaf, ())
    where = f" in sample {index[0]}" if index else ""
    held = f"the batch holds {number(suspect.made.batch_largest[leaf])}{where} of {leaf or 'its tensor'}"
    return f"{held}, above {limit_of(suspect.format)}"


def _writes_a_constant(suspect: Suspect) -> str:
    magnitude = suspect.producer.input_largest or suspect.value or 0.0
    return (
        f"{named(suspect.producer)} writes a constant of magnitude {number(magnitude)} into a "
        f"{suspect.format.short} tensor: it becomes infinite there, and rows that are masked throughout become NaN"
    )


def _cancels(suspect: Suspect) -> str:
    return f"{_departed(suspect)}: its operands cancel, or have lost their digits before it"


def precision_cause(suspect: Suspect) -> Finding:
    """The finding of a step that is finite in FP32 and not in FP16."""
    survived = survivor(suspect.made)
    finite = f"; at a loss scale of {number(survived.scale)} it is finite" if survived else ""
    if survived and suspect.producer.phase == "forward":
        finite = f"; at a loss scale of {number(survived.scale)} the gradients are finite, and not FP32's"
    evidence: dict[str, object] = {
        "value": suspect.value,
        "limit": None if suspect.departs else suspect.format.largest,
        "reached": suspect.producer.output_largest if suspect.departs else None,
        "loss_scale": suspect.low.scale,
        "survives_scale": survived.scale if survived else None,
    }
    code, message_of = next(((code, text) for code, holds, text in DECISIONS if holds(suspect)), ("", overflow))
    if not code:
        known = f" and reaches only {_magnitude(suspect)} in FP32" if suspect.value is not None else ""
        message = f"{named(suspect.producer)} is not finite in {suspect.format.short}{known}: no overflow explains it"
        return finding_at(UNKNOWN, suspect.made, message + finite, suspect.producer, **evidence)
    if suspect.leaf is not None:
        index = suspect.made.batch_index.get(suspect.leaf, ())
        evidence |= {"name": suspect.leaf, "first_index": list(index)}
    return finding_at(code, suspect.made, message_of(suspect) + finite, suspect.producer, **evidence)


def overflow(suspect: Suspect) -> str:
    """Where an op overflows, how far FP32 goes there, and where the op's format ends."""
    verb = "has inputs of up to" if suspect.is_cast else "reaches"
    where = "" if suspect.is_cast else " in FP32"
    is_above = suspect.value is not None and suspect.value > suspect.format.largest
    limit = f"{', above' if is_above else ', next to'} {limit_of(suspect.format)}"
    return f"{named(suspect.producer)} {verb} {_magnitude(suspect)}{where}{limit}"


def _overflow_in_half(suspect: Suspect) -> str:
    reached = f", where FP32 reaches only {number(suspect.value)}" if suspect.value is not None else ""
    at = f"at a loss scale of {number(suspect.low.scale)}{reached}"
    return f"{named(suspect.producer)} exceeds {limit_of(suspect.format)} {at}"


DECISIONS: tuple[tuple[str, Callable[[Suspect], bool], Callable[[Suspect], str]], ...] = (
    ("data-range", lambda suspect: suspect.leaf is not None, _beyond_range),
    ("mask-constant", lambda suspect: suspect.is_constant, _writes_a_constant),
    ("eps-underflow", lambda suspect: suspect.divides_by_flushed or suspect.is_pole, _flushed),
    (FAR_FROM_FP32, lambda suspect: suspect.departs, _cancels),
    (OVERFLOWS["forward"], lambda suspect: suspect.overflows and suspect.producer.phase == "forward", overflow),
    (OVERFLOWS["backward"], lambda suspect: suspect.overflows, overflow),
    (OVERFLOWS["backward"], lambda suspect: suspect.overflows_in_half_alone, _overflow_in_half),
)
"""The first that holds is the code, with its message; where none holds, the cause is not known."""


def finding_at(code: str, made: Investigation, message: str, at: Producer | None = None, **evidence: object) -> Finding:
    """A finding at the op, module and line of a producer; evidence that is None is left out."""
    phase = at.phase if at else "backward" if made.why == "gradients" else "forward"
    return finding_of(
        code,
        made.step,
        phase,
        message,
        remedy=remedy_of(code, at),
        module=at.module if at else "",
        op=at.op if at else "",
        parameter=at.parameter if at else "",
        source=at.source if at else None,
        evidence={key: value for key, value in evidence.items() if value is not None},
    )


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


def _magnitude(suspect: Suspect) -> str:
    scale = suspect.low.scale
    at_scale = f" at a loss scale of {number(scale)}" if suspect.producer.phase == "backward" and scale != 1.0 else ""
    return f"{number(suspect.value or 0.0)}{at_scale}"


def _departed(suspect: Suspect) -> str:
    reached = number(suspect.producer.output_largest)
    return f"{named(suspect.producer)} reaches {reached} where FP32 has {_magnitude(suspect)}, and a later op overflows"


def takes_a_pole(suspect: Suspect) -> str:
    """What an op does with the value that half has rounded to where the op is infinite, as messages say it."""
    at = " or ".join(map(number, POLES_ELSEWHERE.get(base_name(suspect.producer.op), ()))) or "zero"
    return f"{_takes(suspect)} a value that {format_of(suspect.low.dtype).short} rounds to {at}"


def _takes(suspect: Suspect) -> str:
    name = base_name(suspect.producer.op)
    return "is given" if name in POLES_ELSEWHERE else "takes the logarithm of" if name in LOGARITHMS else "divides by"
