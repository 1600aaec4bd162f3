"""Findings where what a run does in which dtype contradicts what was asked for, or what its code has made float32."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampdbg.diagnosis.decisions import KEPT, Decision, holding
from ampdbg.formats import FLOAT32, FORMATS
from ampdbg.quantities import listed
from ampdbg.record.findings import Finding
from ampdbg.record.run import CastBuffer, KindDtypes, Record

NOT_HALF, HALF_WEIGHTS, ROUNDED = "not-half", "half-weights", "rounded-buffer"

MIXED = re.compile(r"(bf16|fp16|.*-mixed|param_dtype=b?float16)$")
"""What asks for half ops on float32 weights."""

HALF = re.compile(f"on$|{MIXED.pattern}")
"""What asks for half ops, a scaler among it that is on."""

FULL = re.compile(r"(no|32|32-true|float32)$")
"""What asks for FP32, though some frameworks take it for granted where nothing is said."""

TORCHS = "torch.optim."
"""Optimizers of others may round by chance, or keep what rounding takes."""

AFAR, ANGLE, SHORT = 1000, 0.1, 0.01
"""An angle that is further off at this position, in rad, is another one; so is an average that stops so far from what
it follows, relative to that."""

ROUTERS = ("expert", "e")
"""How the biases of routers are called: ``expert_bias``, ``e_score_correction_bias``."""


@dataclass(frozen=True, eq=False)
class ContractOfRun:
    """What a run stored and computed in which dtypes, and what it was asked for."""

    record: Record

    @property
    def halves(self) -> list[KindDtypes]:
        """The kinds that one of torch's own optimizers trains in half; none where there is a master anywhere."""
        dtypes = self.record.dtypes
        found = [one for one in dtypes if {*one.stored} - {FLOAT32.name} & FORMATS.keys()]
        are_judged = all(one.optimizer.startswith(TORCHS) for one in dtypes) and not any(one.masters for one in dtypes)
        return found if are_judged else []

    @property
    def mixed(self) -> list[str]:
        """Who asks for half ops on float32 weights, and in which words."""
        return self._asked(MIXED)

    @property
    def half(self) -> list[str]:
        """Who asks for half ops."""
        return self._asked(HALF)

    @property
    def full(self) -> list[str]:
        """Who asks for FP32."""
        return self._asked(FULL)

    def _asked(self, words: re.Pattern[str]) -> list[str]:
        return [f"{who} {what}" for who, what in self.record.asked.items() if words.match(what)]

    @property
    def is_in_fp32(self) -> bool:
        """Nothing that was looked at ran in half."""
        return self.record.environment.policy == "none"

    @property
    def dtype(self) -> str:
        """In which half dtypes weights are stored."""
        names = sorted({name for one in self.halves for name in one.stored if name != FLOAT32.name})
        return listed([FORMATS[name].short for name in names if name in FORMATS])

    @property
    def kinds(self) -> list[str]:
        """The kinds of parameter that are stored so."""
        return list(dict.fromkeys(one.kind for one in self.halves))

    @property
    def states(self) -> str:
        """What an optimizer keeps of them."""
        names = sorted({FORMATS[name].short for one in self.halves for name in one.states if name in FORMATS})
        return f"; its states are {listed(names)}" if names else ""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Each finding has its own."""
        return {}

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """The first step."""
        return {"step": next((step.step for step in self.record.steps), 0), "phase": "forward"}


@dataclass(frozen=True, eq=False)
class CastTogether:
    """Buffers of one ``kind``, by how their names begin, that were float32 and were cast to half with their model."""

    kind: str
    buffers: Sequence[CastBuffer]

    @property
    def names(self) -> list[str]:
        """By what they are called."""
        return [one.name for one in self.buffers]

    @property
    def dtype(self) -> str:
        """What they are now."""
        return FORMATS[self.buffers[0].dtype].short

    @property
    def is_written(self) -> bool:
        """The loop has written into them since."""
        return any(one.is_written for one in self.buffers)

    @property
    def radians(self) -> float:
        """How far rounding takes the angle of a position far away, where they are the frequencies of angles."""
        return AFAR * max(one.off for one in self.buffers)

    @property
    def short(self) -> float:
        """How far from what they follow they may stop, relative to that, where they are averages: there a step is half
        a unit in the last place."""
        units = (2.0 ** -FORMATS[one.dtype].precision / (one.momentum or 1.0) for one in self.buffers)
        return max(units) if self.is_written else 0.0

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Which they are."""
        return {"buffers": self.names[:KEPT]}

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """The line of the cast, before all steps."""
        return {"step": 0, "phase": "forward", "source": self.buffers[0].source}


CONTRACT: tuple[Decision[ContractOfRun], ...] = (
    Decision(
        NOT_HALF,
        "a GradScaler or a framework is to lower ops, and none that was looked at ran in half",
        lambda it: it.is_in_fp32 and bool(it.half),
        "no op ran in FP16 or bfloat16, which is asked for ({half}): autocast had no effect on the device of the "
        "weights, or there was none",
        {"asked": "half"},
    ),
    Decision(
        HALF_WEIGHTS,
        "a framework was asked for mixed precision, and half weights train without float32 masters",
        lambda it: bool(it.halves and it.mixed),
        "{mixed} asks for half ops on float32 weights, and what trains is stored in {dtype} ({kinds}), without float32 "
        "masters{states}",
        {"asked": "mixed", "kinds": "kinds"},
    ),
    Decision(
        HALF_WEIGHTS,
        "a framework or the model's config says FP32 and nothing else, and half weights train without float32 masters",
        lambda it: bool(it.halves and it.full and not it.mixed),
        "{full} stands for FP32, and what trains is stored in {dtype} ({kinds}), without float32 masters{states}",
        {"asked": "full", "kinds": "kinds"},
        severity="info",
    ),
)

CASTS: tuple[Decision[CastTogether], ...] = (
    Decision(
        ROUNDED,
        "a cast of the model rounds its rotary frequencies, by over 0.1 rad at position 1,000",
        lambda it: it.kind == "inv" and it.radians > ANGLE,
        "the cast of the model has rounded {names} to {dtype}: at position 1,000 angles are up to {radians} rad off",
    ),
    Decision(
        ROUNDED,
        "a cast of the model makes half running averages, which stop over 1 % short of what they follow",
        lambda it: it.kind == "running" and it.short > SHORT,
        "the cast of the model has made {names} {dtype}: these averages stop up to {short:.1%} from what they follow",
    ),
    Decision(
        ROUNDED,
        "a cast of the model makes a half bias of a router, to which the loop adds small steps",
        lambda it: it.kind in ROUTERS and it.is_written,
        "the cast of the model has made {names} {dtype}, and the loop adds to it: a step below half a unit in the last "
        "place is lost",
    ),
)


def contradictions(record: Record) -> Iterator[Finding]:
    """``not-half`` and ``half-weights``: what was asked for, and did not happen."""
    run = ContractOfRun(record)
    return (row.finding(run) for row in holding(CONTRACT, run))


def cast_buffers(record: Record) -> Iterator[Finding]:
    """``rounded-buffer``: float32 buffers that were cast with their model, where that harms."""
    kinds: dict[str, list[CastBuffer]] = {}
    for one in record.cast_buffers:
        kinds.setdefault(one.name.rpartition(".")[2].partition("_")[0], []).append(one)
    together = [CastTogether(kind, of_it) for kind, of_it in kinds.items()]
    return (row.finding(it) for it in together for row in holding(CASTS, it))
