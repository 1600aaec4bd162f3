"""``ampdbg lint``: AMP misuse and apex found in source code, without running it, and fixed where that is certain."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ampdbg.errors import EXIT_COULD_NOT_RUN, EXIT_FOUND, EXIT_HEALTHY, ConfigError

from . import options
from .output import look_of, say, write_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ampdbg.lint.engine import Linted, LintedFile

Codes = Annotated[
    list[str] | None, typer.Option("--select", metavar="CODE", help="Only these codes or prefixes. Repeatable.")
]


def command(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Python files, notebooks and folders.")],
    fix: Annotated[bool, typer.Option("--fix", help="Write the certain fixes into the files.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print what --fix would change; write nothing.")] = False,
    select: Codes = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="CODE", help="Not these codes or prefixes. Repeatable.")
    ] = None,
    format_: Annotated[
        Literal["text", "json", "github", "sarif"], typer.Option("--format", help="Output format.")
    ] = "text",
    debug: options.Debug = False,
) -> int:
    """Find AMP misuse and apex in source code, without running it.

    Ignores lines that end with "# ampdbg: ignore[CODE]". pyproject.toml may set select, ignore and exclude in
    [tool.ampdbg.lint]. The exit code is 1 for an error or a warning. It is 2 where nothing was found and a
    file could not be read.
    """
    if fix and diff:
        raise ConfigError("got --fix and --diff; give only one: --diff shows what --fix would write")
    # Here, as `ampdbg --help` is not to wait for the rules.
    from ampdbg.lint import engine
    from ampdbg.lint.settings import read_settings

    settings = read_settings(paths, _codes(select), _codes(ignore))
    found = engine.lint(paths, settings)
    if diff:
        return _show_diff(engine.fix(found, settings))
    written: list[LintedFile] = []
    if fix:
        written = _write(engine.fix(found, settings))
        found = engine.lint(paths, settings)
    write_result(_text(found, paths, format_, len(written)), sys.stdout)
    return exit_code(found)


def exit_code(found: Linted) -> int:
    """1 where an error or a warning is found, else 2 where a file could not be looked at, else 0."""
    if any(finding.severity != "info" for finding in found.findings):
        return EXIT_FOUND
    return EXIT_COULD_NOT_RUN if found.problems else EXIT_HEALTHY


def _codes(given: Sequence[str] | None) -> list[str]:
    """``--select a,b`` is ``--select a --select b``."""
    return [code for one in given or () for code in one.split(",")]


def _show_diff(files: Sequence[LintedFile]) -> int:
    """The diffs on stdout; 1 where there is one."""
    from ampdbg.patch.file_edits import FileEdit, base_folder, unified_diff

    edits = [FileEdit(Path(file.path), file.before, file.after) for file in _changed(files) if file.after is not None]
    if not edits:
        return EXIT_HEALTHY
    base, _ = base_folder(edits, Path.cwd())
    for edit in edits:
        path = PurePosixPath(edit.path.resolve().relative_to(base).as_posix())
        write_result(unified_diff(path, edit.before, edit.after), sys.stdout)
    return EXIT_FOUND


def _changed(files: Sequence[LintedFile]) -> list[LintedFile]:
    """Those that a fix changes; why another could not be is said."""
    for file in files:
        if file.problem:
            say(f"warning: {file.path} {file.problem}")
    return [file for file in files if file.after is not None]


def _write(files: Sequence[LintedFile]) -> list[LintedFile]:
    """All of them or none: a hook runs over files with changes that are not committed, and --diff looks first."""
    from ampdbg.patch.file_edits import FileEdit, write_edits

    changed = _changed(files)
    edits = [FileEdit(Path(file.path), file.before, file.after) for file in changed if file.after is not None]
    write_edits(edits, force=True)
    return changed


def _text(found: Linted, paths: Sequence[str], format_: str, fixed: int) -> str:
    from ampdbg.report import lint as report

    if format_ == "json":
        return report.as_json(found)
    if format_ == "github":
        return report.as_annotations(found)
    if format_ == "sarif":
        return report.as_sarif(found, str(Path.cwd()))
    from ampdbg.report.formats.text import draw

    return draw(report.page(found, shlex.join(paths), fixed), look_of(sys.stdout))
