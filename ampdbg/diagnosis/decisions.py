"""A row of the table of causes: a code, the condition that calls for it, and what is said where it holds."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ampdbg.quantities import counted, listed, number, percent
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding, Severity

Subject = TypeVar("Subject", bound="Evident")


NAMED, KEPT = 3, 20
"""So many of a list are named in a message, and go into the record."""


class Evident:
    """What rows are asked about: it knows its facts, and where a finding about it stands."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The evidence of every finding about it."""
        return {}

    @abstractmethod
    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """The fields of a finding of this row: ``step`` and ``phase``, and those of its place as far as known."""


def fact(subject: Any, name: str) -> Any:
    """A fact by its dotted name, of a list that of each; None where it is that of nothing, as of a replay that was not
    made."""
    for part in name.split("."):
        if isinstance(subject, list):
            subject = [getattr(one, part) for one in subject]
        else:
            subject = None if subject is None else getattr(subject, part)
    return subject


class _Facts(string.Formatter):
    """Fills in the facts of a subject by name: numbers as messages write them, ``{many:step}`` with the noun that they
    count, ``{cost:percent}``, and of many names the first; ``{names:parameter}`` is how many they are."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return fact(args[0], field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, (list, tuple)):
            return self.format_field(len(value), format_spec) if format_spec else listed(value, NAMED)
        if format_spec == "percent":
            return percent(value)
        if isinstance(value, int) and len(format_spec) > 1:  # the noun that it counts
            return counted(value, format_spec)
        is_number = isinstance(value, (int, float)) and not format_spec
        return number(value) if is_number else str(super().format_field(value, format_spec))


FACTS = _Facts()
UNSAID: tuple[Any, ...] = (None, "", [], ())
PART = re.compile(r"\[(.*?)\]")


def said(template: str, subject: Any) -> str:
    """The template with facts of the subject. A part in brackets is left out where one of its facts is not known, or
    empty."""

    def part(found: re.Match[str]) -> str:
        named = [name for _, name, _, _ in FACTS.parse(found[1]) if name]
        return found[1] if not any(fact(subject, name) in UNSAID for name in named) else ""

    return FACTS.format(PART.sub(part, template), subject)


@dataclass(frozen=True)
class Decision(Generic[Subject]):
    """One row.

    Attributes:
        code: of the finding.
        when: the condition in words, as ``ampdbg explain`` prints it.
        holds: the condition.
        message: what the finding says: a template of :func:`said`.
        evidence: its numbers besides those of every finding about the subject, each by its name and the fact that it
            is; those that are None or empty are left out.
        remedy: such a template too; None: that of the code, or of the place.
        severity: None: that of the code.
        fields: others of the finding.
    """

    code: str
    when: str
    holds: Callable[[Subject], bool]
    message: str
    evidence: Mapping[str, str] = field(default_factory=dict)
    remedy: str | None = None
    severity: Severity | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def says(self, subject: Subject) -> str:
        """Its message about a subject of which it holds."""
        return said(self.message, subject)

    def finding(self, subject: Subject) -> Finding:
        """The finding about a subject of which it holds."""
        own = {name: _kept(fact(subject, of)) for name, of in self.evidence.items()}
        known = {name: value for name, value in subject.numbers.items() if value is not None}
        known |= {name: value for name, value in own.items() if value not in UNSAID}
        remedy = {} if self.remedy is None else {"remedy": said(self.remedy, subject)}
        severity = {} if self.severity is None else {"severity": self.severity}
        given = {**subject.place(self), **self.fields, **remedy, **severity}
        return finding_of(self.code, message=self.says(subject), evidence=known, **given)


def _kept(value: Any) -> Any:
    return list(value[:KEPT]) if isinstance(value, (list, tuple)) else value


def first(rows: Iterable[Decision[Subject]], subject: Subject) -> Decision[Subject]:
    """The first row that holds of a subject; the last row of a table holds of every one."""
    return next(holding(rows, subject))


def holding(rows: Iterable[Decision[Subject]], subject: Subject) -> Iterator[Decision[Subject]]:
    """Every row that holds of a subject, in order."""
    return (row for row in rows if row.holds(subject))
