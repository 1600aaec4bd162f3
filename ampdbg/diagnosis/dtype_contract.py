"""Findings about dtypes: the run contradicts the requested precision, or half cannot hold a buffer's values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampdbg.diagnosis.decisions import KEPT, Decision, Evident
from ampdbg.diagnosis.producers import format_of
from ampdbg.formats import FORMATS, HALF_NAMES, FloatFormat
from ampdbg.quantities import listed
from ampdbg.record.run import CastBuffer, HalfCount, Record

NOT_HALF, HALF_WEIGHTS, ROUNDED = "not-half", "half-weights", "rounded-buffer"

MIXED = re.compile(r"(bf16|fp16|.*-mixed|param_dtype=b?float16)$")
"""Requested precisions that mean half ops on float32 weights."""

HALF = re.compile(f"on$|{MIXED.pattern}")
"""Requested precisions that mean half ops, including an enabled scaler."""

FULL = re.compile(r"(no|32|32-true|float32)$")
"""Requested precisions that mean FP32. In some frameworks they are the default."""

TORCHS = "torch.optim."
"""Prefix of torch's own optimizers. Third-party optimizers may round stochastically, or keep what rounding removes."""

ANGLE, SHORT = 0.1, 0.01
"""The largest harmless errors. The first, in rad, is for an angle at a model's last position. The second is for a
running average, relative to the value that it follows."""

ROUTERS = ("expert", "e")
"""Prefixes of router biases: ``expert_bias``, ``e_score_correction_bias``."""


@dataclass(frozen=True)
class ContractOfRun(Evident):
    """The requested precision, and what happened.

    ``half``, ``mixed`` and ``full`` are requests for half ops, for half ops on float32 weights, and for FP32. If
    ``is_in_fp32``, no examined op ran in half. If ``kinds`` is not empty, these weights train in half ``dtype``,
    without any masters.
    """

    is_in_fp32: bool
    half: Sequence[str]
    mixed: Sequence[str]
    full: Sequence[str]
    dtype: str
    kinds: Sequence[str]

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        return {"step": 0, "phase": "forward"}


@dataclass(frozen=True)
class CastTogether(Evident):
    """Buffers of one ``kind`` (the first part of their names) that were cast from float32 to half with their model.

    If they are frequencies of angles, the angle at position ``reach`` is wrong by ``radians``. A running average stops
    at the relative distance ``short``, where its step is half a unit in the last place. ``is_written``: the loop has
    written into the buffers since.
    """

    kind: str
    first: CastBuffer
    names: Sequence[str]
    dtype: str
    reach: int
    radians: float
    short: float
    is_written: bool

    @property
    def numbers(self) -> Mapping[str, Any]:
        return {"buffers": list(self.names[:KEPT])}

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """Return the line of the cast, at step 0."""
        return {"step": 0, "phase": "forward", "source": self.first.source}


@dataclass(frozen=True)
class RunningCount(Evident):
    """A count in half, ``seen`` in a run. At its ``limit`` a further step rounds to nothing."""

    seen: HalfCount

    @property
    def format(self) -> FloatFormat:
        return format_of(self.seen.dtype)

    @property
    def limit(self) -> float:
        """The lowest power of two at which a step is at most half a unit in the last place."""
        return math.ldexp(1.0, math.ceil(math.log2(self.seen.step)) + self.format.precision)

    @property
    def lost(self) -> float:
        """The number of steps between the count and its value without rounding."""
        return (self.seen.expected - self.seen.value) / self.seen.step

    @property
    def off(self) -> float:
        """The share by which the count misses its value without rounding."""
        return 1.0 - self.seen.value / self.seen.expected if self.seen.expected else math.inf

    @property
    def numbers(self) -> Mapping[str, Any]:
        return {"buffers": [self.seen.name], "step_of_count": self.seen.step, "limit": self.limit}

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        return {"step": 0, "phase": "forward", "remedy": COUNT_IN}


COUNT_IN = "keep the count in float32, or in an integer"

LOST = 3.0
"""A count at its limit has stopped if at least this many steps are missing: an epoch's last one may be smaller."""

ENDLESS = 0.1
"""A count below its limit was never cleared if it misses at most this share. A skipped step's writes are not expected.
"""

CONTRACT: tuple[Decision[ContractOfRun], ...] = (
    Decision(
        NOT_HALF,
        "a GradScaler or a framework should lower ops, and no examined op ran in half",
        lambda it: it.is_in_fp32 and bool(it.half),
        "no op ran in FP16 or bfloat16, although {half} asks for it: autocast had no effect on the device of the "
        "weights, or there was none",
        {"asked": "half"},
    ),
    Decision(
        HALF_WEIGHTS,
        "a framework was asked for mixed precision, and half weights train without float32 masters",
        lambda it: bool(it.kinds and it.mixed),
        "{mixed} asks for half ops on float32 weights, but the trained weights are stored in {dtype} ({kinds}), "
        "without float32 masters",
        {"asked": "mixed", "kinds": "kinds"},
    ),
    Decision(
        HALF_WEIGHTS,
        "a framework or the model's config says FP32 and nothing else, and half weights train without float32 masters",
        lambda it: bool(it.kinds and it.full and not it.mixed),
        "{full} means FP32, but the trained weights are stored in {dtype} ({kinds}), without float32 masters",
        {"asked": "full", "kinds": "kinds"},
        severity="info",
    ),
)

CASTS: tuple[Decision[CastTogether], ...] = (
    Decision(
        ROUNDED,
        "a cast of the model rounds its rotary frequencies, by over 0.1 rad at its last position or at 1,000",
        lambda it: it.kind == "inv" and it.radians > ANGLE,
        "the cast of the model rounded {names} to {dtype}: at position {reach:,} angles are up to {radians} rad off",
    ),
    Decision(
        ROUNDED,
        "a cast of the model makes half running averages, which stop over 1 % short of what they follow",
        lambda it: it.kind == "running" and it.is_written and it.short > SHORT,
        "the cast of the model made {names} {dtype}: these averages stop up to {short:.1%} from what they follow",
    ),
    Decision(
        ROUNDED,
        "a cast of the model makes a half bias of a router, to which the loop adds small steps",
        lambda it: it.kind in ROUTERS and it.is_written,
        "the cast of the model made {names} {dtype}, and the loop adds to it: a step below half a unit in the "
        "last place is lost",
    ),
)


COUNTS: tuple[Decision[RunningCount], ...] = (
    Decision(
        ROUNDED,
        "a scalar in half grew by equal steps, and stays where a further step rounds away",
        lambda it: it.seen.value >= it.limit and it.lost >= LOST,
        "{seen.name} is {format.short}, and each write adds {seen.step}: it stays at {seen.value}, where a further "
        "{seen.step} rounds away; without rounding it would be {seen.expected}",
    ),
    Decision(
        ROUNDED,
        "a scalar in half grows by equal steps, and has not reached the limit where a further step rounds away",
        lambda it: it.seen.value < it.limit <= it.format.largest and abs(it.off) <= ENDLESS,
        "{seen.name} is {format.short}, and each write adds {seen.step}: it will stay at {limit}, where a further "
        "{seen.step} rounds away",
        severity="info",
    ),
)


def contracts(record: Record) -> Iterator[ContractOfRun]:
    """Yield the requests for a precision, with what happened."""
    half, mixed, full = (
        [f"{who} {what!r}" for who, what in record.asked.items() if words.match(what)] for words in (HALF, MIXED, FULL)
    )
    are_torchs = all(one.optimizer.startswith(TORCHS) and not one.masters for one in record.dtypes)
    lowered = [(one.kind, HALF_NAMES.intersection(one.stored)) for one in record.dtypes if are_torchs]
    kinds = list(dict.fromkeys(kind for kind, names in lowered if names))
    dtype = listed(sorted({FORMATS[name].short for _, names in lowered for name in names}))
    yield ContractOfRun(record.environment.policy == "none", half, mixed, full, dtype, kinds)


def counts(record: Record) -> Iterator[RunningCount]:
    """Yield the counts in half."""
    return map(RunningCount, record.half_counts)


def casts(record: Record) -> Iterator[CastTogether]:
    """Yield the float32 buffers that were cast with their model, grouped by the first part of their names."""
    kinds: dict[str, list[CastBuffer]] = {}
    for one in record.cast_buffers:
        kinds.setdefault(one.name.rpartition(".")[2].partition("_")[0], []).append(one)
    for kind, buffers in kinds.items():
        yield CastTogether(
            kind=kind,
            first=buffers[0],
            names=[one.name for one in buffers],
            dtype=FORMATS[buffers[0].dtype].short,
            reach=max(buffers, key=lambda one: one.off * one.reach).reach,
            radians=max(one.off * one.reach for one in buffers),
            short=max(2.0 ** -FORMATS[one.dtype].precision / (one.momentum or 1.0) for one in buffers),
            is_written=any(one.is_written for one in buffers),
        )
