"""A row of a decision table: a finding code, its condition, and the message if the condition holds."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ampdbg.quantities import counted, listed, number, percent, scale
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding, Severity

Subject = TypeVar("Subject", bound="Evident")


NAMED, KEPT = 3, 20
"""The number of items of a list in a message, and in the record."""


class Evident:
    """A subject of decision tables. It provides facts, and the place of a finding."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The evidence in every finding about the subject."""
        return {}

    @abstractmethod
    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """Return the fields of a finding from this row: ``step``, ``phase``, and the rest of its place if known."""


def fact(subject: Any, name: str) -> Any:
    """Return the fact with a dotted name; for a list, the fact of each item. Return None if an object on the way is
    None, such as a missing replay."""
    for part in name.split("."):
        if isinstance(subject, list):
            subject = [getattr(one, part) for one in subject]
        else:
            subject = None if subject is None else getattr(subject, part)
    return subject


class _Facts(string.Formatter):
    """Formats a template with a subject's facts by name. ``{many:step}`` adds the noun to a count; ``{cost:percent}``
    and ``{last:scale}`` use these functions. A list shows its first items, or with ``{names:parameter}`` its length."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return fact(args[0], field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, (list, tuple)):
            return self.format_field(len(value), format_spec) if format_spec else listed(value, NAMED)
        if format_spec in ("percent", "scale"):
            return {"percent": percent, "scale": scale}[format_spec](value)
        if isinstance(value, int) and len(format_spec) > 1:  # the spec is the noun that the number counts
            return counted(value, format_spec)
        is_number = isinstance(value, (int, float)) and not format_spec
        return number(value) if is_number else str(super().format_field(value, format_spec))


FACTS = _Facts()
MISSING: tuple[Any, ...] = (None, "", [], ())
PART = re.compile(r"\[(.*?)\]")


def said(template: str, subject: Any) -> str:
    """Return the template with the subject's facts. A part in brackets is omitted if one of its facts is unknown or
    empty."""

    def part(found: re.Match[str]) -> str:
        named = [name for _, name, _, _ in FACTS.parse(found[1]) if name]
        return found[1] if not any(fact(subject, name) in MISSING for name in named) else ""

    return FACTS.format(PART.sub(part, template), subject)


@dataclass(frozen=True)
class Decision(Generic[Subject]):
    """One row of a decision table.

    Attributes:
        code: the code of the finding.
        when: the condition in words, as ``ampdbg explain`` prints it.
        holds: the condition.
        message: a template of :func:`said` for the finding's message.
        evidence: names of further evidence, each with the name of its fact. None and empty values are omitted.
        remedy: a template; None for the remedy of the code or the place.
        severity: None for the severity of the code.
    """

    code: str
    when: str
    holds: Callable[[Subject], bool]
    message: str
    evidence: Mapping[str, str] = field(default_factory=dict)
    remedy: str | None = None
    severity: Severity | None = None

    def says(self, subject: Subject) -> str:
        """Return the message about a subject that satisfies the condition."""
        return said(self.message, subject)

    def finding(self, subject: Subject) -> Finding:
        """Return the finding about a subject that satisfies the condition."""
        own = {name: _kept(fact(subject, of)) for name, of in self.evidence.items()}
        known = {name: value for name, value in subject.numbers.items() if value is not None}
        known |= {name: value for name, value in own.items() if value not in MISSING}
        remedy = {} if self.remedy is None else {"remedy": said(self.remedy, subject)}
        severity = {} if self.severity is None else {"severity": self.severity}
        given = {**subject.place(self), **remedy, **severity}
        return finding_of(self.code, message=self.says(subject), evidence=known, **given)


def _kept(value: Any) -> Any:
    return list(value[:KEPT]) if isinstance(value, (list, tuple)) else value


def first(rows: Iterable[Decision[Subject]], subject: Subject) -> Decision[Subject]:
    """Return the first row that holds for a subject. The last row of a table holds for every subject."""
    return next(holding(rows, subject))


def holding(rows: Iterable[Decision[Subject]], subject: Subject) -> Iterator[Decision[Subject]]:
    """Yield every row that holds for a subject, in order."""
    return (row for row in rows if row.holds(subject))
