"""``ampdbg init``: write a commented config and a workload to start from."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ampdbg.errors import EXIT_HEALTHY
from ampdbg.escapes import printable

from .streams import write_result


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The folder to write into; by default this one.")
    ] = Path(),
) -> int:
    """Write a config and a workload to start from.

    Writes ampdbg.yaml, with a comment for each key, and workload.py, a small model with its data. They run
    unchanged: ampdbg init && ampdbg scan
    """
    from ampdbg.config.starter import write_starter  # `ampdbg --help` does not need it

    written = write_starter(folder)
    typed = shlex.quote(str(folder) if not str(folder).startswith("-") else f"./{folder}")
    there = f"cd {typed} && " if folder != Path() else ""
    lines = [*map(str, written), f"Next: {there}ampdbg scan"]
    write_result("\n".join(map(printable, lines)) + "\n", sys.stdout)
    return EXIT_HEALTHY
