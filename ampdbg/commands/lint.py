"""``ampdbg lint``: find AMP misuse and apex in source code without running it, and apply the certain fixes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ampdbg.errors import EXIT_COULD_NOT_RUN, EXIT_FOUND, EXIT_HEALTHY, ConfigError

from .output import look_of
from .streams import say, write_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ampdbg.lint.engine import Linted, LintedFile
    from ampdbg.patch.file_edits import FileEdit

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
) -> int:
    """Find AMP misuse and apex in source code, without running it.

    Ignores lines that end with "# ampdbg: ignore[CODE]". pyproject.toml may set select, ignore and exclude in
    [tool.ampdbg.lint]. The exit code is 1 for an error or a warning. It is 2 where nothing was found and a
    file could not be read.
    """
    if fix and diff:
        raise ConfigError("got --fix and --diff; give only one: --diff shows what --fix would write")
    # Imported here, so that `ampdbg --help` does not wait for the rules.
    from ampdbg.lint import engine
    from ampdbg.lint.settings import read_settings

    settings = read_settings(paths, _codes(select), _codes(ignore))
    found = engine.lint(paths, settings)
    if diff:
        return _show_diff(_edits(engine.fix(found, settings)))
    edits: list[FileEdit] = []
    if fix:  # all or none, even in files with uncommitted changes: a hook runs on those, and --diff previews them
        from ampdbg.patch.file_edits import write_edits

        edits = _edits(engine.fix(found, settings))
        write_edits(edits, force=True)
        found = engine.lint(paths, settings)
    from ampdbg.report import lint as report
    from ampdbg.report.formats.text import draw

    writers: dict[str, Callable[[], str]] = {
        "text": lambda: draw(report.page(found, shlex.join(paths), len(edits)), look_of(sys.stdout)),
        "json": lambda: report.as_json(found),
        "github": lambda: report.as_annotations(found),
        "sarif": lambda: report.as_sarif(found, str(Path.cwd())),
    }
    write_result(writers[format_](), sys.stdout)
    return exit_code(found)


def exit_code(found: Linted) -> int:
    """Return 1 for an error or a warning, else 2 if a file could not be linted, else 0."""
    if any(finding.severity != "info" for finding in found.findings):
        return EXIT_FOUND
    return EXIT_COULD_NOT_RUN if found.problems else EXIT_HEALTHY


def _codes(given: Sequence[str] | None) -> list[str]:
    """Split ``--select a,b`` into ``--select a --select b``."""
    return [code for one in given or () for code in one.split(",")]


def _edits(files: Sequence[LintedFile]) -> list[FileEdit]:
    """Return the edits of a fix; warn of each file that could not be fixed."""
    from ampdbg.patch.file_edits import FileEdit

    for file in files:
        if file.problem:
            say(f"warning: {file.path} {file.problem}")
    return [FileEdit(Path(file.path), file.before, file.after) for file in files if file.after is not None]


def _show_diff(edits: Sequence[FileEdit]) -> int:
    """Print the diffs on stdout; return 1 if there is one."""
    from ampdbg.patch.file_edits import base_folder, unified_diff

    base, _ = base_folder(edits, Path.cwd()) if edits else (Path(), False)
    for edit in edits:
        path = PurePosixPath(edit.path.resolve().relative_to(base).as_posix())
        write_result(unified_diff(path, edit.before, edit.after), sys.stdout)
    return EXIT_FOUND if edits else EXIT_HEALTHY
