"""The config that a command was given: a YAML file, the config in a record, or what a Python file defines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ampdbg.errors import ConfigError
from ampdbg.record.file import read_record
from ampdbg.record.pins import Search, Strategy
from ampdbg.record.run import Record

if TYPE_CHECKING:
    from ampdbg.config import Config

EITHER = "give either a config or a module file: CONFIG, or --module FILE.py"
NO_FOLDER = "a record's paths count from where it was made; run this there, or give the config itself"
NO_CONFIG = "a watched loop has no config to run again; give a config"


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
    if is_python(config):
        raise ConfigError(f"{config}: a Python file, not a config; try: ampdbg bisect --module {_quoted(config)}")
    return _from_record(config, overrides) if is_record(config) else config_of_yaml(config, overrides)


def config_of_yaml(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML config; ``overrides`` replace keys in it.

    Raises:
        ConfigError: there are mistakes in it, or it is a Python file; the message says how to write a config for it.
    """
    if is_python(path):
        file = path.as_posix()
        raise ConfigError(
            f"{path}: a Python file, not a config; write a config, such as config.yaml, with two lines:\n"
            f'  model: {{target: "{file}:build_model"}}\n'
            f'  data: {{target: "{file}:build_data"}}'
        )
    from ampdbg.config import load_config

    return load_config(path, overrides)


def is_python(path: Path) -> bool:
    """Whether a Python file was given in the place of a config."""
    return path.suffix == ".py" and path.is_file()


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def told_of_watched_loop(path: Path, command: str, strategy: Strategy) -> Record | None:
    """What ``command`` says of the record of a watched loop, which has no config to run: that no pin helps.

    None where there is something to run: a config, or a record that has one.

    Raises:
        ConfigError: pins may help in the loop, or nothing is wrong with it; it would have to be run to tell.
        RecordError: the record is damaged, or cannot be read.
    """
    record = read_record(path) if is_record(path) else None
    if record is None or record.config:
        return None
    root = next((finding for finding in record.findings if finding.severity != "info"), None)
    if root is None or record.verdict != "other":
        raise ConfigError(f"{path}: {NO_CONFIG}")
    return replace(record, command=command, search=Search(strategy, "no-pin-helps", root.message))


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
