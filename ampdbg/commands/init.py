"""``ampdbg init``: write a commented config and a workload to start from. They run without changes."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from ampdbg.errors import EXIT_HEALTHY, ConfigError, reason_of
from ampdbg.escapes import printable

from .options import DEFAULT_CONFIG
from .streams import write_result

FILES = {DEFAULT_CONFIG.name: "ampdbg.yaml", "workload.py": "workload.py.txt"}
"""The files to write, by name, with their sources in ``config/starter``, which are not ampdbg's own code."""


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The folder to write into; by default this one.")
    ] = Path(),
) -> int:
    """Write a config and a workload to start from.

    Writes ampdbg.yaml, with a comment for each key, and workload.py, a small model with its data. They run
    unchanged: ampdbg init && ampdbg scan
    """
    there = [str(folder / name) for name in FILES if os.path.lexists(folder / name)]
    if there:
        is_there = f"{' and '.join(there)} {'exists' if len(there) == 1 else 'exist'} already"
        raise ConfigError(f"{is_there}; ampdbg init overwrites nothing: name another folder, ampdbg init FOLDER")
    try:
        _write_starter(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {reason_of(error)}") from None
    typed = shlex.quote(str(folder) if not str(folder).startswith("-") else f"./{folder}")
    go_there = f"cd {typed} && " if folder != Path() else ""
    lines = [*(str(folder / name) for name in FILES), f"Next: {go_there}ampdbg scan"]
    write_result("\n".join(map(printable, lines)) + "\n", sys.stdout)
    return EXIT_HEALTHY


def _write_starter(folder: Path) -> None:
    """Write the files into the folder, which is created if missing. After an error none is left."""
    with ExitStack() as undoing:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            undoing.callback(folder.rmdir)
        for name, source in FILES.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                undoing.callback((folder / name).unlink, missing_ok=True)
                text = (resources.files("ampdbg.config") / "starter" / source).read_text(encoding="utf-8")
                file.write(text)
        undoing.pop_all()  # keep the files
