"""The findings of ampdbg lint as a page, as JSON, as GitHub's annotations and as SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from ampdbg.escapes import harmless, printable
from ampdbg.lint.engine import Linted, LintFinding
from ampdbg.quantities import counted
from ampdbg.record.findings import Severity

from .view import TONES, Headline, Page, Paragraph, StyledLine, Words, filled, first, line, next_of

ANNOTATIONS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}
"""GitHub's name for each severity."""


def page(linted: Linted, given: str, fixed: int = 0) -> Page:
    """Return the page of all findings and of files that could not be read; ``given`` are the paths as typed."""
    unread = tuple(line(f"{file.path}: {file.problem}", tone="doubtful") for file in linted.problems)
    sections = filled(*(Paragraph(tuple(_lines(one))) for one in linted.findings), Paragraph(unread, "Not read"))
    codes = [finding.code for finding in linted.findings[:1]]
    next_ = next_of(
        (any(finding.fixable for finding in linted.findings), "see the fixes", f"ampdbg lint --diff {given}"),
        (codes, "what it means", f"ampdbg explain {''.join(codes)}"),
    )
    return harmless(Page(_headline(linted, fixed), sections, next_command=next_))


def _headline(linted: Linted, fixed: int) -> Headline:
    count, files = len(linted.findings), counted(linted.files, "file")
    was = f"{counted(fixed, 'file')} fixed. " * bool(fixed)
    fixable, unread = sum(finding.fixable for finding in linted.findings), len(linted.problems)
    found = f"{was}{counted(count, 'finding')} in {files}{f'; {fixable} can be fixed' * bool(fixable)}."
    not_read = (
        f"{was}{unread:,} of {files} could not be read{'; nothing found in the others' * (unread < linted.files)}."
    )
    return first(
        ("error" in [finding.severity for finding in linted.findings], Headline("bad", found)),
        (count, Headline("doubtful", found)),
        (unread, Headline("doubtful", not_read)),
        (True, Headline("good", f"{was}Nothing found in {files}.")),
    )


def _lines(finding: LintFinding) -> Iterator[StyledLine]:
    fixable = " [fix]" if finding.fixable else ""
    severity = Words(finding.severity, TONES[finding.severity])
    yield line(place(finding), " ", severity, " ", Words(finding.code, "strong"), Words(fixable, "good"))
    yield line(finding.text, tone="strong", depth=2, is_code=True)
    yield line(finding.message, depth=1)
    yield line(Words("Remedy: ", "good"), finding.remedy, depth=1)


def place(finding: LintFinding) -> str:
    """Return ``train.py:12:9``; in a notebook with the cell."""
    cell = f":cell {finding.cell}" if finding.cell else ""
    return f"{finding.path}{cell}:{finding.line}:{finding.column}"


def as_json(linted: Linted) -> str:
    """Return everything as one JSON object."""
    data = {
        "format": "ampdbg.lint",
        "version": 1,
        "files": linted.files,
        "findings": [asdict(finding) for finding in linted.findings],
        "problems": [{"path": file.path, "problem": file.problem} for file in linted.problems],
    }
    return json.dumps(data, indent=2) + "\n"


def as_annotations(linted: Linted) -> str:
    """Return one workflow command for each finding, which GitHub shows at its line of a pull request."""
    text = ""
    for finding in linted.findings:
        where = {"file": finding.path, "line": finding.line, "col": finding.column, "title": finding.code}
        if finding.cell:
            where = {"file": finding.path, "title": f"{finding.code} (cell {finding.cell}, line {finding.line})"}
        values = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in where.items())
        said = _escaped(f"{finding.message}. {finding.remedy}")
        text += f"::{ANNOTATIONS[finding.severity]} {values}::{said}\n"
    problems = ((_escaped(file.path, ":,"), _escaped(file.problem)) for file in linted.problems)
    return text + "".join(f"::warning file={path},title=Not read::{problem}\n" for path, problem in problems)


def _escaped(text: str, more: str = "") -> str:
    """Escape text as GitHub's toolkit escapes the data and the properties of its commands."""
    for character in ("%", "\r", "\n", *more):
        text = text.replace(character, f"%{ord(character):02X}")
    return printable(text)


def as_sarif(linted: Linted, folder: str) -> str:
    """Return a SARIF log; files below ``folder`` are named relative to it."""
    from .formats import sarif

    found = []
    for one in linted.findings:
        said = f"{one.message}\nRemedy: {one.remedy}"
        at = (0, 0) if one.cell else (one.line, one.column)  # a cell's lines are not lines of the notebook's file
        found.append(sarif.Alert(one.code, one.severity, said, one.path, *at, one.text))
    return sarif.to_json(sarif.log(found, folder))
