"""What ampdbg lint found: as a page, as JSON, as GitHub's annotations and as SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from ampdbg.escapes import harmless, printable
from ampdbg.lint.engine import Linted, LintFinding
from ampdbg.quantities import counted
from ampdbg.record.findings import Severity

from .view import Headline, NextCommand, Page, Paragraph, Section, StyledLine, Tone, Words, line

TONES: Mapping[Severity, Tone] = {"error": "bad", "warning": "doubtful", "info": "name"}
ANNOTATIONS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}
"""What GitHub calls a severity."""


def page(linted: Linted, given: str, fixed: int = 0) -> Page:
    """All findings, and the files that could not be looked at; ``given`` are the paths as they were typed."""
    return harmless(Page(_headline(linted, fixed), tuple(_sections(linted)), next_command=_next(linted, given)))


def _headline(linted: Linted, fixed: int) -> Headline:
    count, files = len(linted.findings), counted(linted.files, "file")
    was = f"{counted(fixed, 'file')} fixed. " if fixed else ""
    if count:
        fixable = sum(finding.fixable for finding in linted.findings)
        can = f"; {fixable} can be fixed" if fixable else ""
        worst = next(name for name in TONES if any(finding.severity == name for finding in linted.findings))
        return Headline("bad" if worst == "error" else "doubtful", f"{was}{counted(count, 'finding')} in {files}{can}.")
    if linted.problems:
        return Headline(
            "doubtful", f"{was}Nothing found in {files}, of which {len(linted.problems)} could not be read."
        )
    return Headline("good", f"{was}Nothing found in {files}.")


def _sections(linted: Linted) -> Iterator[Section]:
    for finding in linted.findings:
        yield Paragraph(tuple(_lines(finding)))
    if linted.problems:
        unread = tuple(line(f"{file.path}: {file.problem}", tone="doubtful") for file in linted.problems)
        yield Paragraph(unread, "Not read")


def _lines(finding: LintFinding) -> Iterator[StyledLine]:
    fixable = " [fix]" if finding.fixable else ""
    severity = Words(finding.severity, TONES[finding.severity])
    yield line(place(finding), " ", severity, " ", Words(finding.code, "strong"), Words(fixable, "good"))
    yield line(finding.text, tone="strong", depth=2, is_code=True)
    yield line(finding.message, depth=1)
    yield line(Words("Remedy: ", "good"), finding.remedy, depth=1)


def place(finding: LintFinding) -> str:
    """``train.py:12:9``; of a notebook with its cell."""
    cell = f":cell {finding.cell}" if finding.cell else ""
    return f"{finding.path}{cell}:{finding.line}:{finding.column}"


def _next(linted: Linted, given: str) -> NextCommand | None:
    if any(finding.fixable for finding in linted.findings):
        return NextCommand("see the fixes", f"ampdbg lint --diff {given}")
    if linted.findings:
        return NextCommand("what it means", f"ampdbg explain {linted.findings[0].code}")
    return None


def as_json(linted: Linted) -> str:
    """All of it as one object."""
    data = {
        "format": "ampdbg.lint",
        "version": 1,
        "files": linted.files,
        "findings": [asdict(finding) for finding in linted.findings],
        "problems": [{"path": file.path, "problem": file.problem} for file in linted.problems],
    }
    return json.dumps(data, indent=2) + "\n"


def as_annotations(linted: Linted) -> str:
    """One workflow command a finding, which GitHub shows at its line of a pull request."""
    return "".join(f"{_annotation(finding)}\n" for finding in linted.findings)


def _annotation(finding: LintFinding) -> str:
    where = {"file": finding.path, "line": finding.line, "col": finding.column, "title": finding.code}
    if finding.cell:
        where = {"file": finding.path, "title": f"{finding.code} (cell {finding.cell}, line {finding.line})"}
    values = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in where.items())
    return f"::{ANNOTATIONS[finding.severity]} {values}::{_escaped(f'{finding.message}. {finding.remedy}')}"


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's toolkit escapes the data and the properties of its commands."""
    for character in ("%", "\r", "\n", *more):
        text = text.replace(character, f"%{ord(character):02X}")
    return printable(text)


def as_sarif(linted: Linted, folder: str) -> str:
    """A SARIF log; files below ``folder`` are named from there."""
    from .formats import sarif

    found = [
        sarif.Alert(
            finding.code,
            finding.severity,
            f"{finding.message}\nRemedy: {finding.remedy}",
            finding.path,
            0 if finding.cell else finding.line,
            0 if finding.cell else finding.column,
            finding.text,
        )
        for finding in linted.findings
    ]
    return sarif.to_json(sarif.log(found, folder))
