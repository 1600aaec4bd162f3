"""``ampdbg compare``: compare two records of one command; the exit code is 1 if the second is worse."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ampdbg.errors import EXIT_FOUND, EXIT_HEALTHY, RecordError
from ampdbg.escapes import harmless
from ampdbg.record.file import read_record, strict

from . import options
from .output import in_form, look_of
from .streams import write_result

ComparisonFormat = Literal["text", "json", "markdown", "sarif"]


def _number(value: float) -> float:
    if math.isnan(value):
        raise typer.BadParameter("got nan; allowed: a number of bits, 0 or more")
    return value


RECORD = "A record file; every run writes one into .ampdbg/."


def command(
    then: Annotated[Path, typer.Argument(metavar="THEN", help=RECORD, show_default=False)],
    now: Annotated[Path, typer.Argument(metavar="NOW", help=RECORD, show_default=False)],
    within: Annotated[
        float,
        typer.Option(
            "--within",
            metavar="BITS",
            min=0.0,
            callback=_number,
            help="Tolerate a loss of this many bits of headroom, or of usable loss scales.",
        ),
    ] = 1.0,
    format_: Annotated[
        ComparisonFormat, typer.Option("--format", help="Output format; sarif lists only what is new.")
    ] = "text",
    verbose: options.Verbose = False,
) -> int:
    """Compare two records: what got worse.

    Compares findings, overflows, headroom and the loss scales that work. THEN and NOW are two records of the same
    command. The exit code is 1 where NOW is worse: a new finding or overflow, or more lost bits than --within allows.
    """
    # Imported here, so that `ampdbg --help` does not wait for them.
    from ampdbg.diagnosis.comparison import Comparison
    from ampdbg.report.comparison import data, page
    from ampdbg.report.formats import markdown, sarif, text

    compared = Comparison(read_record(then), read_record(now), within)
    ran, other = compared.then.command, compared.now.command
    if ran != other:  # the same code has different meanings in two commands
        raise RecordError(
            f"{then} comes from ampdbg {ran} and {now} from ampdbg {other}; compare takes two records of the same "
            "command"
        )
    folder, names = str(Path.cwd()), (str(then), str(now))
    shown, new = harmless(page(compared, *names), folder), replace(compared.now, findings=compared.appeared)
    writers: dict[ComparisonFormat, Callable[[], str]] = {
        "text": lambda: text.draw(shown, look_of(sys.stdout), is_brief=not verbose),
        "json": lambda: json.dumps(strict(data(compared, *names)), indent=1, allow_nan=False) + "\n",
        "markdown": lambda: markdown.draw(shown),
        "sarif": lambda: sarif.to_json(sarif.log(list(sarif.alerts(new)), folder)),
    }
    write_result(in_form(writers[format_](), format_), sys.stdout)
    return EXIT_FOUND if compared.is_worse else EXIT_HEALTHY
