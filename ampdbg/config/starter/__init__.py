"""A config and a workload to start from, as ``ampdbg init`` writes them: they run as they are."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

from ampdbg.errors import ConfigError, reason_of

CONFIG = Path("ampdbg.yaml")
"""What commands take that are given no config."""

FILES = {CONFIG.name: "ampdbg.yaml", "workload.py": "workload.py.txt"}
"""What is written, and the file of this package that holds it: no code of ampdbg's."""


def write_starter(folder: Path) -> list[Path]:
    """Writes the files into ``folder``, which is made where it is missing, and nothing over what is there.

    Raises:
        ConfigError: one of them is there, or cannot be written; then none is left.
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
            undoing.pop_all()  # all is there, and stays
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {reason_of(error)}") from None
    return [folder / name for name in FILES]
