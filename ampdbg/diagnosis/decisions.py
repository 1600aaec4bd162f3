"""A row of the table of causes: a code, the condition that calls for it, and what is said where it holds."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from ampdbg.quantities import counted, listed, number
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding, Severity

Subject = TypeVar("Subject", bound="Evident")


NAMED, KEPT = 3, 20
"""So many of a list are named in a message, and go into the record."""


class Evident(Protocol):
    """What rows are asked about: it knows its facts, and where a finding about it stands."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The evidence of every finding about it."""

    def place(self, row: Decision[Any]) -> Mapping[str, Any]:
        """The fields of a finding of this row: ``step`` and ``phase``, and those of its place as far as known."""


class _Facts(string.Formatter):
    """Fills in the facts of a subject by name: numbers as messages write them, ``{many:step}`` with the noun that they
    count, and of many names the first."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return attrgetter(field_name)(args[0]), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, (list, tuple)):
            return listed(value, NAMED)
        if isinstance(value, int) and len(format_spec) > 1:  # the noun that it counts
            return counted(value, format_spec)
        is_number = isinstance(value, (int, float)) and not format_spec
        return number(value) if is_number else str(super().format_field(value, format_spec))


@dataclass(frozen=True)
class Decision(Generic[Subject]):
    """One row.

    Attributes:
        code: of the finding.
        when: the condition in words, as ``ampdbg explain`` prints it.
        holds: the condition.
        message: what the finding says, with facts of the subject in braces.
        evidence: its numbers besides those of every finding about the subject, each by its name and the fact that it
            is; those that are None or empty are left out.
        remedy: with facts in braces; None: that of the code, or of the place.
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
        return _Facts().format(self.message, subject)

    def finding(self, subject: Subject) -> Finding:
        """The finding about a subject of which it holds."""
        own = {name: _kept(attrgetter(fact)(subject)) for name, fact in self.evidence.items()}
        known = {name: value for name, value in subject.numbers.items() if value is not None}
        known |= {name: value for name, value in own.items() if value not in (None, [])}
        given = {**subject.place(self), **self.fields}
        given |= {} if self.remedy is None else {"remedy": _Facts().format(self.remedy, subject)}
        given |= {} if self.severity is None else {"severity": self.severity}
        return finding_of(self.code, message=self.says(subject), evidence=known, **given)


def _kept(value: Any) -> Any:
    return list(value[:KEPT]) if isinstance(value, (list, tuple)) else value


def first(rows: Iterable[Decision[Subject]], subject: Subject) -> Decision[Subject]:
    """The first row that holds of a subject; the last row of a table holds of every one."""
    return next(holding(rows, subject))


def holding(rows: Iterable[Decision[Subject]], subject: Subject) -> Iterator[Decision[Subject]]:
    """Every row that holds of a subject, in order."""
    return (row for row in rows if row.holds(subject))
