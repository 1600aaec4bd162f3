"""A finding, and the lines of code that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from ampdbg.quantities import module_name

Severity = Literal["error", "warning", "info"]
Phase = Literal["data", "forward", "backward", "optimizer"]

# record/file.py checks these bounds when it reads a record file.
Count = Annotated[int, Interval(ge=0, lt=2**63)]
Exponent = Annotated[int, Interval(ge=-1100, le=1100)]
"""An exponent of a power of two that float64 can represent."""


@dataclass(frozen=True)
class CodeLine:
    """A line of code with its text at run time."""

    file: str
    line: Count
    function: str
    text: str


@dataclass(frozen=True)
class Source(CodeLine):
    """A line of user or library code: the innermost frame outside torch and ampdbg. ``called_from`` is the user's
    line that called a library. It does not count when sources are compared."""

    called_from: CodeLine | None = field(default=None, compare=False)


def place_of(source: Source | None) -> str:
    """Return ``train.py:12``, or "" without a line."""
    return f"{source.file}:{source.line}" if source is not None else ""


@dataclass(frozen=True)
class Listing:
    """Lines of a file at the time of the record. ``first`` is the number of the first line, from 1."""

    file: str
    first: Count
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One fault, or for ``info`` one useful fact. ``root`` is the index of the finding that explains this one, or
    None. ``evidence`` holds plain numbers and strings, ready for JSON."""

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
        """The step as reports name it, with the iteration if several optimizers take turns."""
        iteration = self.evidence.get("iteration")
        return f"step {self.step}" + (f" (iteration {iteration})" if isinstance(iteration, int) else "")

    @property
    def where(self) -> tuple[str, ...]:
        """The step, the phase, and the module, op and parameter if known."""
        known = filter(None, (module_name(self.module, ""), self.op, self.parameter))
        return self.at_step, self.phase, *known

    @property
    def replayed_step(self) -> int:
        """The step with the replays that show the fault. It is later than ``step`` if the fault began before any
        replay."""
        replayed = self.evidence.get("replayed_step")
        return replayed if isinstance(replayed, int) else self.step
