"""What ampdbg can find: the Finding, where it lies, and the codes in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

Severity = Literal["error", "warning", "info"]
Phase = Literal["data", "forward", "backward", "optimizer"]

# What a record file is compared with when it is read (record/file.py).
Count = Annotated[int, Interval(ge=0, lt=2**63)]
Exponent = Annotated[int, Interval(ge=-1100, le=1100)]
"""Of a power of two that float64 holds."""


@dataclass(frozen=True)
class CodeLine:
    """A line of code, as it stood when it ran."""

    file: str
    line: Count
    function: str
    text: str


@dataclass(frozen=True)
class Source(CodeLine):
    """A line of the user's or a library's code: the innermost frame that is neither torch's nor ampdbg's.

    One of a library's is the same line from wherever in the user's code it was ``called_from``.
    """

    called_from: CodeLine | None = field(default=None, compare=False)


def place_of(source: Source | None) -> str:
    """``train.py:12``; "" where no line is known."""
    return f"{source.file}:{source.line}" if source is not None else ""


@dataclass(frozen=True)
class Listing:
    """Lines of a file as they stood when the record was made, the ``first`` counted from 1."""

    file: str
    first: Count
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong (or, for ``info``, that is worth knowing).

    ``root`` is the index in the record's findings of the one that explains this one, or None.
    ``evidence`` holds plain numbers and strings, ready for JSON.
    """

    code: str
    severity: Severity
    step: Count
    phase: Phase
    message: str
    remedy: str = ""
    module: str = ""
    op: str = ""
    parameter: str = ""
    source: Source | None = None
    evidence: Mapping[str, object] = field(default_factory=dict)
    root: Count | None = None

    @property
    def at_step(self) -> str:
        """Its step as pages name it; where several optimizers take turns also the iteration of its own."""
        iteration = self.evidence.get("iteration")
        return f"step {self.step}" + (f" (iteration {iteration})" if isinstance(iteration, int) else "")

    @property
    def where(self) -> tuple[str, ...]:
        """Its step and phase, and those of its module, op and parameter that are known."""
        known = (part for part in (self.module, self.op, self.parameter) if part)
        return self.at_step, self.phase, *known

    @property
    def replayed_step(self) -> int:
        """The step whose replays decided it: later than ``step`` where the same fault began before any replay."""
        replayed = self.evidence.get("replayed_step")
        return replayed if isinstance(replayed, int) else self.step
