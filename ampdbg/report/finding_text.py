"""Findings as text: code, place, message, remedy, where to read more; what follows from one in a line below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding

from .layout import INDENT, indented, verbatim

SEVERITY_STYLE = {"error": "red", "warning": "yellow", "info": "cyan"}


def findings_text(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """Every finding that stands for itself, each with its follow-ups."""
    roots = [root_of(findings, index) for index in range(len(findings))]
    for index, finding in enumerate(findings):
        if roots[index] == index:
            yield _finding(finding)
            yield from (_follow_up(findings[other]) for other, root in enumerate(roots) if root == index != other)


def root_of(findings: Sequence[Finding], index: int) -> int:
    """The index at the end of the chain of ``root``; a damaged chain, one in a circle, ends at its lowest index."""
    path = {index}
    while True:
        root = findings[index].root
        if root is None or not 0 <= root < len(findings):
            return index
        if root in path:
            return min(path)
        path.add(root)
        index = root


def _finding(finding: Finding) -> RenderableType:
    title = Text.assemble((finding.severity, SEVERITY_STYLE[finding.severity]), " ", (finding.code, "bold"))
    title.append(f" · {' · '.join(_where(finding))}")
    lines: list[RenderableType] = [title, indented(Text(finding.message))]
    if finding.source is not None:
        source = finding.source
        lines.append(indented(Text(f"{source.file}:{source.line} in {source.function}", style="dim")))
        lines.append(indented(Text(source.text.strip(), style="bold"), 2 * INDENT))
    if finding.remedy:
        lines.append(indented(Text.assemble(("Remedy: ", "green"), finding.remedy)))
    if finding.code in CODES:
        lines.append(verbatim(f"ampdbg explain {finding.code}", "dim", INDENT))
    return Group(*lines)


def _where(finding: Finding) -> Iterator[str]:
    yield f"step {finding.step}"
    yield finding.phase
    yield from (part for part in (finding.module, finding.op, finding.parameter) if part)


def _follow_up(finding: Finding) -> RenderableType:
    return indented(Text(f"└ then {finding.code} at step {finding.step}: {finding.message}", style="dim"))
