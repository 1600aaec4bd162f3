"""The starter config and workload that ``ampdbg init`` writes. They run without changes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

from ampdbg.errors import ConfigError, reason_of

CONFIG = Path("ampdbg.yaml")
"""The default config file of commands."""

FILES = {CONFIG.name: "ampdbg.yaml", "workload.py": "workload.py.txt"}
"""The files to write, by name, with their sources in this package, which are not ampdbg's own code."""


def write_starter(folder: Path) -> list[Path]:
    """Write the files into ``folder``, which is created if missing. No existing file is overwritten.

    Raises:
        ConfigError: a file exists or cannot be written; then none is left.
    """
    there = [str(folder / name) for name in FILES if os.path.lexists(folder / name)]
    if there:
        is_there = f"{' and '.join(there)} {'exists' if len(there) == 1 else 'exist'} already"
        raise ConfigError(f"{is_there}; ampdbg init overwrites nothing: name another folder, ampdbg init FOLDER")
    try:
        with ExitStack() as undoing:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                undoing.callback(folder.rmdir)
            for name, source in FILES.items():
                with (folder / name).open("x", encoding="utf-8") as file:
                    undoing.callback((folder / name).unlink, missing_ok=True)
                    file.write((resources.files(__package__ or __name__) / source).read_text(encoding="utf-8"))
            undoing.pop_all()  # keep the files
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {reason_of(error)}") from None
    return [folder / name for name in FILES]
