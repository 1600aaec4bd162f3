"""``ampdbg report``: render a record again, in any format, to stdout or a file."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ampdbg import api
from ampdbg.errors import EXIT_HEALTHY
from ampdbg.record.file import LATEST, latest_record, write_atomically
from ampdbg.record.run import Record
from ampdbg.report.formats import FORMATS, written

from . import options
from .output import PLAIN, in_form, look_of, typed_as
from .streams import write_result


def _known(name: str) -> str:
    if name not in FORMATS:
        raise typer.BadParameter(f"got {name!r}; allowed: {', '.join(FORMATS)}")
    return name


def _formats(begun: str) -> list[str]:
    """Return the formats that complete what was typed in the shell."""
    return [name for name in FORMATS if name.startswith(begun)]


def _run_again(record: Record, path: Path) -> str:
    """Return what to type to rerun the record's command: the script's command line, or the record with its config."""
    if record.command == "run" and record.script is not None:
        return record.script.command_line
    return shlex.quote(str(path)) if record.config or record.script is not None else "CONFIG"


def command(
    record: Annotated[
        Path | None,
        typer.Argument(metavar="[RECORD]", help="A record or a log; by default .ampdbg/latest.json."),
    ] = None,
    format: Annotated[  # noqa: A002
        str,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            callback=_known,
            autocompletion=_formats,
            help="Output format.",
        ),
    ] = "text",
    output: options.OutputFile = None,
    verbose: options.Verbose = False,
) -> int:
    """Show a record again, in any format."""
    path = record or latest_record()
    options.check_place("--output", output, "record" if format == "json" else format, record=path, latest_record=LATEST)
    shown = api.read(path)
    look = look_of(sys.stdout) if output is None else PLAIN
    typed = replace(typed_as(_run_again(shown, path), path, verbose=verbose), is_record=True)
    text = written(shown, typed, look, format)
    if output is None:
        write_result(in_form(text, format), sys.stdout)
    else:
        write_atomically(output, text)
    return EXIT_HEALTHY
