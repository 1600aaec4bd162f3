"""Lint files on every core: find the files, run the rules on each, and apply the fixes."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ampdbg.errors import AmpdbgError
from ampdbg.lint.facts import USES_HALF, Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.lint.rules import RULES
from ampdbg.lint.settings import Settings
from ampdbg.lint.sources import (
    NEVER,
    SourcePath,
    SourceText,
    UnreadableSource,
    content_of,
    files_below,
    read_bytes,
    source_of,
)
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Severity
from ampdbg.source.document import Document
from ampdbg.source.edits import Fix, applied
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

ENOUGH_FOR_PROCESSES = 64
"""With fewer files, other processes would start too late to help."""

MOST_ROUNDS = 10
"""Fixes that overlap are applied in this many rounds at most, as one fix may allow another."""

_IGNORE = re.compile(r"#\s*ampdbg:\s*ignore(?:\[([^\]]*)\])?")


@dataclass(frozen=True)
class LintFinding:
    """One finding at one place: lines and columns count from 1, ``cell`` is the cell of a notebook, 0 in a file."""

    code: str
    severity: Severity
    message: str
    remedy: str
    path: str
    line: int
    column: int
    text: str
    fixable: bool
    cell: int = 0


@dataclass(frozen=True)
class LintedFile:
    """The result for one file; ``in_half_only`` are findings if the project trains in half.

    ``problem`` says why the file could not be linted or fixed. ``after`` is its content with the fixes, if they were
    requested and change the content.
    """

    path: str
    root: str = ""
    findings: tuple[LintFinding, ...] = ()
    in_half_only: tuple[LintFinding, ...] = ()
    uses_half: bool = False
    problem: str = ""
    before: bytes = b""
    after: bytes | None = None


@dataclass(frozen=True)
class Linted:
    """The result of a run; ``files`` counts linted files, ``in_half`` has the files of projects that train in half."""

    findings: tuple[LintFinding, ...]
    files: int
    problems: tuple[LintedFile, ...]
    in_half: frozenset[str] = frozenset()


def lint(paths: Sequence[str], settings: Settings) -> Linted:
    """Lint files and folders.

    Raises:
        AmpdbgError: one of the paths does not exist, or there is nothing to lint.
    """
    below = list(files_below(paths, settings.exclude))
    if not below:
        excluded = f", and what pyproject.toml excludes ({', '.join(settings.exclude)})" if settings.exclude else ""
        raise AmpdbgError(
            f"{', '.join(paths)}: no Python file or notebook there; ampdbg lint ignores hidden folders, virtual "
            f"environments, {', '.join(sorted(NEVER))}{excluded}"
        )
    files = _each(below, partial(lint_file, settings=settings))
    roots = {file.root for file in files if file.uses_half}
    in_half = frozenset(file.path for file in files if file.root in roots)
    found: list[LintFinding] = []
    for file in files:
        of_file = (*file.findings, *(file.in_half_only if file.path in in_half else ()))
        found += sorted(of_file, key=lambda one: (one.cell, one.line, one.column))
    return Linted(tuple(found), len(files), tuple(file for file in files if file.problem), in_half)


def fix(linted: Linted, settings: Settings) -> list[LintedFile]:
    """Return the files that have something to fix, each with its fixed content."""
    paths = dict.fromkeys(finding.path for finding in linted.findings if finding.fixable)
    return [fixed_file(path, settings, in_half=path in linted.in_half) for path in paths]


def _each(found: Sequence[SourcePath], work: partial[LintedFile]) -> list[LintedFile]:
    """Lint the files in order, with several processes if that is quicker."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(found) < ENOUGH_FOR_PROCESSES or count < 2:
        return [work(one) for one in found]
    # Imported here: after a script that ampdbg ran, Python may be shutting down, and the import fails.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(count, multiprocessing.get_context()) as pool:
        return list(pool.map(work, found, chunksize=16))


def lint_file(found: SourcePath, settings: Settings) -> LintedFile:
    """Lint one file; any failure becomes its ``problem``."""
    looked_at = partial(LintedFile, found.path, found.root)
    if found.problem:
        return looked_at(problem=found.problem)
    try:
        content = read_bytes(found.path)
        rules, uses_half = wanted_rules(content, settings), USES_HALF.search(content) is not None
        shown = list(_findings_of(found.path, source_of(found.path, content), rules, settings)) if rules else []
    except (UnreadableSource, *UNPARSABLE) as error:
        return looked_at(problem=_problem(error))
    sure, only_in_half = (tuple(one for one, only in shown if only is wanted) for wanted in (False, True))
    return looked_at(sure, only_in_half, uses_half)


def _problem(error: Exception) -> str:
    if isinstance(error, UnreadableSource):
        return str(error)
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno} does not parse: {error.msg}"
    why = "it is nested too deeply" if isinstance(error, (RecursionError, MemoryError)) else str(error)
    return f"does not parse: {why}"


def wanted_rules(content: bytes, settings: Settings) -> tuple[Rule, ...]:
    """Return the rules that a file may break, by its bytes."""
    return tuple(
        rule
        for rule in RULES
        if rule.may_find(content)
        and any(map(settings.wants, rule.codes))
        and not (rule.since and settings.torch and settings.torch < rule.since)
    )


def hits_of(document: Document, rules: Sequence[Rule], settings: Settings) -> list[RuleHit]:
    """Return the hits of the rules in a document, without hits that a comment ignores.

    A hit has no fix if the fix would also change an ignored hit, or cannot be written.
    """
    facts = Facts(document)
    every = [hit for rule in rules for hit in rule.check(facts)]
    kept = [hit for hit in every if settings.wants(hit.code) and not _is_ignored(document, hit)]
    ids = set(map(id, kept))
    held_back = {id(hit.fix) for hit in every if id(hit) not in ids or _edits_f_string(document, hit)}
    return [replace(hit, fix=None) if id(hit.fix) in held_back else hit for hit in kept]


def _is_ignored(document: Document, hit: RuleHit) -> bool:
    """True if a ``# ampdbg: ignore`` for the code is on the hit's line, or its statement's first or last line."""
    statement, first = document.statement(hit.node), hit.node.lineno  # type: ignore[attr-defined]
    last = statement.lineno if hasattr(statement, "body") else statement.end_lineno or statement.lineno
    comments = (_IGNORE.search(document.line(number)) for number in {first, statement.lineno, last})
    return any(found and (found[1] is None or hit.code in re.split(r"[\s,]+", found[1])) for found in comments)


def _findings_of(
    path: str, source: SourceText, rules: Sequence[Rule], settings: Settings
) -> Iterator[tuple[LintFinding, bool]]:
    """Yield the findings of a text, each with True if it counts only in a project that trains in half.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: Python cannot parse the text.
    """
    document = Document(source.text)
    for hit in hits_of(document, rules, settings):
        code = CODES[hit.code]
        cell, line = source.cell_of(hit.node.lineno)  # type: ignore[attr-defined]
        yield (
            LintFinding(
                code=hit.code,
                severity="warning" if hit.in_half_only else hit.severity or code.severity,
                message=hit.message or code.message,
                remedy=hit.step or code.remedy,
                path=path,
                line=line,
                column=document.column(hit.node),
                text=document.line(hit.node.lineno).strip(),  # type: ignore[attr-defined]
                fixable=hit.fix is not None,
                cell=cell,
            ),
            hit.in_half_only,
        )


def fixed_file(path: str, settings: Settings, *, in_half: bool) -> LintedFile:
    """Return a file with its fixes applied."""
    try:
        content = read_bytes(path)
        source = source_of(path, content)
        rules = wanted_rules(content, settings)

        def fixable(document: Document) -> list[RuleHit]:
            return [hit for hit in hits_of(document, rules, settings) if in_half or not hit.in_half_only]

        text = fixed(source.text, fixable)
        after = content_of(source, text) if text != source.text else None
    except (UnreadableSource, *UNPARSABLE) as error:
        return LintedFile(path, problem=_problem(error))
    return LintedFile(path, before=content, after=after)


def fixed(text: str, hits_of: Callable[[Document], Sequence[RuleHit]]) -> str:
    """Return the text with every fix applied that leaves it parsable.

    Args:
        text: Python source.
        hits_of: returns the hits to fix in a document. Each round calls it again, as one fix may allow another.
    """
    for _ in range(MOST_ROUNDS):
        document = Document(text)
        fixes = _together(hits_of(document))
        if not fixes:
            return text
        try:
            after = applied(document, fixes)
            syntax_tree(after)
        except UNPARSABLE:
            return text
        text = after
    return text


def _edits_f_string(document: Document, hit: RuleHit) -> bool:
    """True if the fix of a hit would change an f-string, in which Pythons before 3.12 misplace nodes.

    They also reject some text in it. An edit that only moves a line changes no string.
    """
    edits = hit.fix.edits if hit.fix is not None else ()
    spans = list(map(document.span, document.find(ast.JoinedStr)))
    changed = (edit.start for edit in edits if (document.text[edit.start : edit.end] + edit.new).strip())
    is_within = any(isinstance(one, ast.JoinedStr) for one in document.around(hit.node))
    return is_within or any(span.start < at < span.end for at in changed for span in spans)


def _together(hits: Sequence[RuleHit]) -> list[Fix]:
    """Return fixes without overlapping edits; of two that overlap, the first."""
    chosen: list[Fix] = []
    for fix in dict.fromkeys(hit.fix for hit in hits if hit.fix is not None):
        if not any(_overlap(fix, other) for other in chosen):
            chosen.append(fix)
    return chosen


def _overlap(one: Fix, other: Fix) -> bool:
    return any(
        edit != its and edit.start < max(its.end, its.start + 1) and its.start < max(edit.end, edit.start + 1)
        for edit in one.edits
        for its in other.edits
    )
