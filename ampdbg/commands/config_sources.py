"""The config that a command was given: a YAML file, the config in a record, or what a Python file defines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampdbg.errors import ConfigError
from ampdbg.record import read_record

if TYPE_CHECKING:
    from ampdbg.config import Config

EITHER = "give either a config or a module file: CONFIG, or --module FILE.py"
NO_FOLDER = "a record's paths count from where it was made; run this there, or give the config itself"


def config_given(config: Path | None, module: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads the one of ``config`` and ``module`` that is there; ``overrides`` replace keys in it.

    A ``config`` that ends in ``.json`` may be a record, whose config is taken: its paths count from where the
    record was made, which is to be the current folder.

    Raises:
        ConfigError: there are both or none, or there are mistakes in it; the message lists them all.
        RecordError: a record that is damaged, or a file that cannot be read.
        WorkloadError: the module file lacks what is needed.
        UserCodeError: importing the module file raised.
    """
    if config is not None and module is not None:
        raise ConfigError(f"got both {config} and --module {module}; {EITHER}")
    if module is not None:
        from ampdbg.workload.module_file import config_of_module_file

        return config_of_module_file(module, overrides)
    if config is None:
        raise ConfigError(f"got nothing to run; {EITHER}")
    return _from_record(config, overrides) if is_record(config) else _from_yaml(config, overrides)


def _from_yaml(path: Path, overrides: Sequence[str]) -> Config:
    from ampdbg.config import load_config

    return load_config(path, overrides)


def _from_record(path: Path, overrides: Sequence[str]) -> Config:
    from ampdbg.config import config_of_record

    record = read_record(path)
    try:
        return config_of_record(record.config, str(path), Path(record.config_folder), overrides)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{NO_FOLDER}") from None


def is_record(path: Path) -> bool:
    """JSON is YAML too: a file of JSON that does not call itself a record is a config."""
    if path.suffix != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True  # reading it as a record says what is wrong
    return isinstance(data, dict) and "format" in data
