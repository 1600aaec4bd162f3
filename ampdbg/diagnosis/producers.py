"""The op where FP16 goes wrong and FP32 does not, and the code that its numbers mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.remedies import finding_at, named
from ampdbg.formats import FLOAT16, FORMATS
from ampdbg.record.findings import Finding
from ampdbg.record.replays import Investigation, Producer, Replay

NEAR = 0.9
"""FP16's own rounding upstream moves a value by less than a tenth: so near the limit FP32 may still be below it."""


@dataclass(frozen=True)
class Suspect:
    """A producer of one investigated step, with what decides its code."""

    made: Investigation
    producer: Producer

    @property
    def low(self) -> Replay:
        """The replay that it belongs to."""
        return self.made.replays[0]

    @property
    def is_cast(self) -> bool:
        """Whether it is nothing but a change of dtype."""
        return self.producer.op.startswith(("aten._to_copy", "aten.copy"))

    @property
    def value(self) -> float | None:
        """The largest magnitude that the op has in FP32 at the loss scale of the step; None where not known."""
        if self.is_cast:
            return self.producer.input_largest
        if self.producer.fp32_largest is None:
            return None
        return self.producer.fp32_largest * (self.low.scale if self.producer.phase == "backward" else 1.0)

    @property
    def overflows(self) -> bool:
        """Whether FP32 has a value there that the op's dtype cannot hold."""
        fmt = FORMATS.get(self.producer.dtype, FLOAT16)
        return self.value is not None and self.value >= NEAR * fmt.overflow_threshold

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
        return next((name for name in names if largest.get(name, 0.0) >= FLOAT16.overflow_threshold), None)

    @property
    def divides_by_flushed(self) -> bool:
        """Whether it divides by a zero that is none in FP32, where it is finite."""
        return self.producer.divides_by_zero and self.producer.finite_in_fp32 is True


def suspects(made: Investigation) -> list[Suspect]:
    """The ops that go wrong in FP16, in order of execution; what FP32 shows too is meant to be."""
    return [Suspect(made, producer) for producer in made.replays[0].producers if producer.finite_in_fp32 is not False]


def culprit(made: Investigation) -> Suspect | None:
    """The suspect that explains the step. Constants are mostly masks: one is blamed when nothing else can be."""
    phases = ("forward",) if made.why == "loss" else ("backward",) if survived_scale(made) else ("forward", "backward")
    found = [suspect for suspect in suspects(made) if suspect.producer.phase in phases]
    return next((suspect for suspect in found if not suspect.is_constant), next(iter(found), None))


def survived_scale(made: Investigation) -> float | None:
    """The highest of the lower loss scales that were tried at which everything is finite."""
    low = made.replays[0]
    return next((replay.scale for replay in made.replays[2:] if replay.dtype == low.dtype and is_finite(replay)), None)


CODES: tuple[tuple[str, Callable[[Suspect], bool]], ...] = (
    ("data-range", lambda suspect: suspect.leaf is not None),
    ("mask-constant", lambda suspect: suspect.is_constant),
    ("eps-underflow", lambda suspect: suspect.divides_by_flushed),
    ("forward-overflow", lambda suspect: suspect.overflows and suspect.producer.phase == "forward"),
    ("gradient-overflow", lambda suspect: suspect.overflows),
    ("unknown", lambda suspect: True),
)
"""The first that holds is the code."""

MESSAGES: dict[str, Callable[[Suspect], str]] = {
    "data-range": lambda suspect: f"{_sample(suspect)}, and FP16 ends at {FLOAT16.largest:g}",
    "mask-constant": lambda suspect: (
        f"{named(suspect.producer)} writes a constant of magnitude {suspect.producer.input_largest:.4g} "
        f"into a half tensor: it is infinite there, and rows that are masked throughout turn NaN"
    ),
    "eps-underflow": lambda suspect: (
        f"{named(suspect.producer)} {_takes(suspect)} what FP16 has rounded to zero; nothing here is large"
    ),
    "unknown": lambda suspect: (
        f"{named(suspect.producer)} is not finite in FP16 and {_in_fp32(suspect)}: no overflow explains it"
    ),
}


def precision_cause(suspect: Suspect) -> Finding:
    """The finding of a step that is finite in FP32 and not in FP16."""
    code = next(code for code, holds in CODES if holds(suspect))
    say = MESSAGES.get(code, _overflow)
    survived = survived_scale(suspect.made)
    return finding_at(
        code,
        suspect.made,
        suspect.producer,
        say(suspect) + (f"; at a loss scale of {survived:g} it is finite" if survived else ""),
        {
            "value": suspect.value,
            "limit": FLOAT16.largest,
            "loss_scale": suspect.low.scale,
            "survives_scale": survived,
            **(_place_in_batch(suspect) if code == "data-range" else {}),
        },
    )


def _overflow(suspect: Suspect) -> str:
    return f"{named(suspect.producer)} {_in_fp32(suspect)}, and FP16 ends at {FLOAT16.largest:g}"


def _in_fp32(suspect: Suspect) -> str:
    return f"reaches {suspect.value:.4g} in FP32" if suspect.value is not None else "finite in FP32"


def _takes(suspect: Suspect) -> str:
    return "takes the logarithm of" if suspect.producer.op.startswith("aten.log") else "divides by"


def _sample(suspect: Suspect) -> str:
    leaf = suspect.leaf or ""
    index = suspect.made.batch_index.get(leaf, ())
    where = f" in sample {index[0]}" if index else ""
    return f"the batch holds {suspect.made.batch_largest[leaf]:.4g}{where} of {leaf or 'its tensor'}"


def _place_in_batch(suspect: Suspect) -> dict[str, object]:
    leaf = suspect.leaf or ""
    return {"name": leaf, "first_index": list(suspect.made.batch_index.get(leaf, ()))}
