"""``ampdbg report``: renders a record again, as text or JSON, to stdout or a file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ampdbg.errors import EXIT_HEALTHY
from ampdbg.record.file import read_record, to_json, write_atomically
from ampdbg.record.folder import latest_record
from ampdbg.record.run import Record

from . import options
from .terminal import PLAIN, Look, look_of, write_result


class Format(str, Enum):
    """How a record can be rendered."""

    text = "text"
    json = "json"


def command(
    record: Annotated[
        Path | None, typer.Argument(metavar="[RECORD]", help="A record file; by default .ampdbg/latest.json.")
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="What to render it as.")] = Format.text,  # noqa: A002
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", dir_okay=False, help="Write it here, not to stdout.")
    ] = None,
    debug: options.Debug = False,
) -> int:
    """Render a record again."""
    path = record or latest_record()
    shown = read_record(path)
    look = look_of(sys.stdout) if output is None else PLAIN
    text = RENDERERS[format](shown, look, path)
    if output is None:
        write_result(text, sys.stdout)
    else:
        write_atomically(output, text)
    return EXIT_HEALTHY


def _as_text(record: Record, look: Look, path: Path) -> str:
    from ampdbg.report.bisection import render_bisection
    from ampdbg.report.ranges import render_ranges
    from ampdbg.report.text import render_text

    # The patch itself is no part of the record: of a suggestion the search is shown, and the proof.
    renderers = {"bisect": render_bisection, "suggest-fp32": render_bisection, "ranges": render_ranges}
    return renderers.get(record.command, render_text)(
        record,
        width=look.width,
        color=look.color,
        unicode=look.unicode,
        record_path=shlex.quote(str(path)),
        folder=str(Path.cwd()),
    )


def _as_json(record: Record, look: Look, path: Path) -> str:
    return to_json(record)


RENDERERS: Mapping[Format, Callable[[Record, Look, Path], str]] = {Format.text: _as_text, Format.json: _as_json}
