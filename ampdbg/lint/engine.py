"""Lint files on every core: find the files, run the rules on each, and apply the fixes.

A notebook is linted as the text of its cells.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import json
import os
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ampdbg.errors import AmpdbgError, reason_of
from ampdbg.files import read_file
from ampdbg.lint.facts import USES_HALF, Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.lint.rules import RULES
from ampdbg.lint.settings import Settings
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Severity
from ampdbg.source.document import Document
from ampdbg.source.edits import Fix, applied
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

ENOUGH_FOR_PROCESSES = 64
"""With fewer files, other processes would start too late to help."""

MOST_ROUNDS = 10
"""Fixes that overlap are applied in this many rounds at most, as one fix may allow another."""

SUFFIXES = (".py", ".ipynb")
NEVER = frozenset({"__pycache__", "node_modules", "build", "dist", "venv"})
"""Folders without code of the user's own. Hidden folders and virtual environments are skipped too."""

MARKS = frozenset({".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt"})
"""The entries that mark a folder as the root of a project."""

MOST_BYTES = {".py": 2_000_000, ".ipynb": 50_000_000}
"""The largest size of a file to lint: programs write larger files, and notebooks contain pictures."""

_MAGIC = re.compile(r"^(\s*)([%!?].*|.*\?\s*)$", re.MULTILINE)
"""A line of a notebook in IPython's own syntax, which Python cannot parse."""

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
    """A file below the folder ``root`` of its project ("" if none), with its findings.

    ``in_half_only`` are findings if the project trains in half.

    ``problem`` says why the file could not be linted or fixed. ``after`` is its content with the fixes, if they were
    requested and change the content. ``is_named``: the user named the file, and not only a folder around it.
    """

    path: str
    root: str = ""
    is_named: bool = False
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
    below = list(_files_below(paths, settings.exclude))
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


def _each(found: Sequence[LintedFile], work: partial[LintedFile]) -> list[LintedFile]:
    """Lint the files in order, with several processes if that is quicker."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(found) < ENOUGH_FOR_PROCESSES or count < 2:
        return [work(one) for one in found]
    # Imported here: after a script that ampdbg ran, Python may be shutting down, and the import fails.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(count, multiprocessing.get_context()) as pool:
        return list(pool.map(work, found, chunksize=16))


def lint_file(found: LintedFile, settings: Settings) -> LintedFile:
    """Lint one file; any failure becomes its ``problem``."""
    if found.problem:
        return found
    try:
        content = _read_bytes(found.path)
        rules, uses_half = wanted_rules(content, settings), USES_HALF.search(content) is not None
        # Of a folder, files that no rule can find anything in are not parsed: that takes six times as long.
        is_parsed = any((rules, uses_half, found.is_named))
        shown = list(_findings_of(found.path, _source_of(found.path, content), rules, settings)) if is_parsed else []
    except (AmpdbgError, *UNPARSABLE) as error:
        return replace(found, problem=_problem(error))
    sure, only_in_half = (tuple(one for one, only in shown if only is wanted) for wanted in (False, True))
    return replace(found, findings=sure, in_half_only=only_in_half, uses_half=uses_half)


def _problem(error: Exception) -> str:
    if isinstance(error, AmpdbgError):
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
    path: str, source: _SourceText, rules: Sequence[Rule], settings: Settings
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
        content = _read_bytes(path)
        source = _source_of(path, content)
        rules = wanted_rules(content, settings)

        def fixable(document: Document) -> list[RuleHit]:
            return [hit for hit in hits_of(document, rules, settings) if in_half or not hit.in_half_only]

        text = fixed(source.text, fixable)
        after = _content_of(source, text) if text != source.text else None
    except (AmpdbgError, *UNPARSABLE) as error:
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


# The files and their text


@dataclass(frozen=True)
class _SourceText:
    """The text of a file and its encoding; of a notebook also its JSON, and each code cell's number and first line."""

    text: str
    encoding: str = "utf-8"
    cells: tuple[tuple[int, int], ...] = ()
    notebook: str = ""

    def cell_of(self, line: int) -> tuple[int, int]:
        """Return the cell that has a line of the text, and the line's number within the cell; cell 0 for a file."""
        number, first = next((cell for cell in reversed(self.cells) if cell[1] <= line), (0, 1))
        return number, line - first + 1


def _files_below(paths: Sequence[str], exclude: Sequence[str]) -> Iterator[LintedFile]:
    """Yield the files at the given paths, each once, in the order of their names.

    Raises:
        AmpdbgError: one of the paths does not exist.
    """
    done: set[str] = set()
    for given in paths:
        if not os.path.lexists(given):
            raise AmpdbgError(f"{given}: there is no such file or folder")
        for found in _below(given, exclude):
            real = os.path.realpath(found.path)
            if real not in done or found.problem:
                done.add(real)
                yield found


def _below(given: str, exclude: Sequence[str]) -> Iterator[LintedFile]:
    """Yield a file itself, or the files below a folder, without linked folders."""
    if not os.path.isdir(given):
        yield LintedFile(given, _project_around(os.path.dirname(given) or "."), is_named=True)
        return
    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(given, onerror=unreadable.append):
        root = _project_around(folder)
        folders[:] = sorted(name for name in folders if not _is_excluded(folder, name, exclude))
        kept = sorted(name for name in files if not _is_excluded(folder, name, exclude))
        yield from (LintedFile(_shown(folder, name), root) for name in kept if name.endswith(SUFFIXES))
    for error in unreadable:
        yield LintedFile(error.filename, problem=f"cannot be read: {error.strerror}")


def _project_around(folder: str) -> str:
    """Return the folder of the project that a folder is in, even above the given folders. Without a mark return "": all
    such files are one project."""
    here = Path(os.path.abspath(folder))
    around = (one for one in (here, *here.parents) if any(os.path.lexists(one / mark) for mark in MARKS))
    return str(next(around, ""))


def _shown(folder: str, name: str) -> str:
    return os.path.join(folder, name).removeprefix("./")


def _is_excluded(folder: str, name: str, exclude: Sequence[str]) -> bool:
    path = _shown(folder, name)
    by_pattern = any(fnmatch.fnmatch(what, pattern) for pattern in exclude for what in (path, name))
    return by_pattern or name.startswith(".") or name in NEVER or os.path.exists(os.path.join(path, "pyvenv.cfg"))


def _read_bytes(path: str) -> bytes:
    """Return the content of a file.

    Raises:
        AmpdbgError: the file cannot be read, or is too large.
    """
    try:
        return read_file(Path(path), MOST_BYTES.get(Path(path).suffix, MOST_BYTES[".py"]))
    except OSError as error:
        raise AmpdbgError(f"cannot be read: {reason_of(error)}") from None


def _source_of(path: str, content: bytes) -> _SourceText:
    """Return the text of a file, or of a notebook's cells.

    Raises:
        AmpdbgError: the file cannot be decoded, or is not a notebook.
    """
    if path.endswith(".ipynb"):
        return _notebook(content)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return _SourceText(content.decode(encoding), encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise AmpdbgError(f"cannot be decoded: {str(error).partition(chr(10))[0]}") from None


def _notebook(content: bytes) -> _SourceText:
    """Return the code cells, each below a comment with its number, so that fixes can be written back."""
    try:
        notebook = content.decode("utf-8")
        cells = [(number, "".join(cell["source"])) for number, cell in enumerate(json.loads(notebook)["cells"], start=1)
                 if cell["cell_type"] == "code"]  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError):
        raise AmpdbgError("is no notebook of version 4") from None
    text, places = "", list[tuple[int, int]]()
    for number, cell in cells:
        if not cell.lstrip().startswith("%%"):  # another language
            places.append((number, text.count("\n") + 2))
            plain = _MAGIC.sub(lambda line: f"{line[1]}{_STANDS_IN}{line[2].encode().hex()}", cell)
            text += f"{_HEAD.format(number)}\n{plain}\n"
    return _SourceText(text, "utf-8", tuple(places), notebook)


_HEAD = "# ampdbg-cell {}"
_HEADS = re.compile(r"^# ampdbg-cell (\d+)\n", re.MULTILINE)
_STANDS_IN = "pass  # ampdbg-magic "
_STOOD_IN = re.compile(rf"{_STANDS_IN}([0-9a-f]+)")
"""The placeholder for a line in IPython's syntax, which it holds in hexadecimal."""


def _content_of(source: _SourceText, text: str) -> bytes:
    """Return the content of a file with another text.

    Raises:
        AmpdbgError: a notebook would not keep its format.
    """
    if not source.notebook:
        return text.encode(source.encoding)
    data = json.loads(source.notebook)
    end = "\n" if source.notebook.endswith("\n") else ""
    before, *parts = _HEADS.split(text)
    if before or json.dumps(data, indent=1, ensure_ascii=False) + end != source.notebook:
        raise AmpdbgError("cannot be fixed in its own format; open it in Jupyter, save it, and try again")
    for number, cell in zip(parts[::2], parts[1::2], strict=True):
        made = _STOOD_IN.sub(lambda line: bytes.fromhex(line[1]).decode(), cell.removesuffix("\n"))
        old = data["cells"][int(number) - 1]["source"]
        data["cells"][int(number) - 1]["source"] = made if isinstance(old, str) else made.splitlines(keepends=True)
    return (json.dumps(data, indent=1, ensure_ascii=False) + end).encode()
