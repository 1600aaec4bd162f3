"""The input of a command, read once: a config, a record, a capture or a module file, and the changes to it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ampdbg.errors import ConfigError
from ampdbg.record.file import CAPTURE_SUFFIX, CAPTURES, LARGEST_CAPTURE, MOST_CAPTURES, read_record
from ampdbg.record.run import Record, ScriptRun

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ampdbg.config.schema import Config

EITHER = "give either a config or a module file: CONFIG, or --module FILE.py"
NO_FOLDER = "a record's paths are relative to the folder where it was made; run this there, or give the config itself"
NO_CONFIG = "a watched loop has no config; give one"


class Changes(TypedDict, total=False):
    """Replacements for keys of a config: four keys by name, any key as ``"dotted.key=YAML value"``."""

    steps: int | None
    device: str | None
    policy: str | None
    seed: int | None
    overrides: Sequence[str]


@dataclass(frozen=True)
class RunSettings:
    """The files that ``run`` keeps beside the record, and the steps that it examines.

    Attributes:
        folder: the folder of captures.
        most: the largest number of captures.
        largest: the largest size of a capture, in bytes.
        investigates: replay failing steps, and compare one healthy step with FP32.
        log: the file of the log; if None, a file in the folder of records.
        trend: sample every ``trend``-th step; 0 for none.
        wanted: the step to capture even if it does not fail; 0 for none.
    """

    folder: Path = CAPTURES
    most: int = MOST_CAPTURES
    largest: int = LARGEST_CAPTURE
    investigates: bool = True
    log: Path | None = None
    trend: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class CommandInput:
    """The input of a command.

    ``name`` is what the user typed, quoted for a shell. ``config`` includes the ``changes``. ``record`` is the record
    that the config was taken from, if any. With a ``capture``, ``config`` is only a placeholder, and ``script``
    replaces the captured command line.
    """

    name: str
    changes: Changes
    config: Config
    record: Record | None = None
    capture: Path | None = None
    script: tuple[str, ...] = ()

    @property
    def typed(self) -> str:
        """The name, followed by the options that change the run, quoted for a shell."""
        pairs = [("--set", setting) for setting in self.changes.get("overrides", ())]
        pairs += [(f"--{key}", str(value)) for key, value in _named(**self.changes).items()]
        pairs += [("--script", shlex.join(self.script))] if self.script else []
        return " ".join([self.name, *(f"{option} {shlex.quote(value)}" for option, value in pairs)])

    def config_for(self, command: str) -> Config:
        """Return the config, for a command that runs one.

        Raises:
            ConfigError: the input is a capture or the record of a script, which have no config.
        """
        if self.capture is None:
            return self.config
        if self.name == _quoted(self.capture):
            what, show = "a capture, which is one step of a script", f"replay the step: ampdbg replay {self.name}"
        else:
            what, show = "the record of a script", f"show it: ampdbg report {self.name}"
        raise ConfigError(f"{self.name}: it is {what}, and ampdbg {command} runs a config; to {show}")


def read_given(
    config: str | Path | None,
    module: str | Path | None = None,
    script: str = "",
    *,
    takes_weights: bool = False,
    **changes: Unpack[Changes],
) -> CommandInput:
    """Read the config or the module file; exactly one must be given.

    A ``config`` may be a record (``.json``); its config is used. Paths in it are relative to the folder where the
    record was made, which must be the current folder. It may also be a capture (``.safetensors``), or the record of a
    script that has captures. Then ``script``, a command line for a shell, replaces the captured one. With
    ``takes_weights`` it may also be the record of a script with half weights and without captures.

    Raises:
        ConfigError: both or none are given, or they have mistakes; the message lists all mistakes.
        RecordError: the record is damaged, or a file cannot be read.
        WorkloadError: the module file lacks what is needed.
        UserCodeError: the import of the module file raised.
    """
    overrides = _overrides(**changes)
    if module is not None:
        if config is not None:
            raise ConfigError(f"got both {config} and --module {module}; {EITHER}")
        from ampdbg.workload.targets import config_of_module_file

        return CommandInput(f"--module {_quoted(module)}", changes, config_of_module_file(Path(module), overrides))
    path = _path_of(config)
    record = read_record(path) if path.suffix == ".json" else None
    captures = record.captures if record is not None else ()
    if path.suffix == CAPTURE_SUFFIX or captures:
        return _of_script(_quoted(path), Path(captures[0]) if captures else path, script, changes)
    if record is not None and record.script is not None:
        if not (takes_weights and record.updates):
            raise ConfigError(_no_capture(_quoted(path), record, record.script))
        return _of_script(_quoted(path), None, script, changes, record)
    if script:
        raise ConfigError(f"got --script with {path}; it goes with a capture, which ampdbg run writes")
    return CommandInput(_quoted(path), changes, _config(path, record, overrides), record)


def _path_of(config: str | Path | None) -> Path:
    if config is None:
        raise ConfigError(f"got nothing to run; {EITHER}")
    try:
        path = Path(config)
    except TypeError:
        kind = type(config).__name__
        allowed = "the path of a config, a record or a capture"
        raise ConfigError(f"got a config of type {kind}; allowed: {allowed}") from None
    if path.suffix == ".py" and os.path.isfile(path):
        raise ConfigError(_no_config(path))
    return path


def _of_script(
    name: str, capture: Path | None, script: str, changes: Changes, record: Record | None = None
) -> CommandInput:
    given = [f"--{key}" for key in _named(**changes)]
    if changes.get("overrides"):
        given.append("--set")
    if given:
        raise ConfigError(
            f"got {' and '.join(given)} with a capture, which is one recorded step and takes none of them"
        )
    if capture is not None and not capture.is_file():
        raise ConfigError(f"{capture}: there is no such capture")
    try:
        started = tuple(shlex.split(script))
    except ValueError as error:
        raise ConfigError(f"--script {shlex.quote(script)}: {str(error).lower()}") from None
    from ampdbg.config.schema import Precision, config_of_script

    return CommandInput(name, changes, config_of_script(Precision()), record, capture, started)


def _no_capture(name: str, record: Record, script: ScriptRun) -> str:
    step = record.last_failing_step
    return (
        f"{name}: the record of a script without a captured step, so there is nothing to replay; to show it: "
        f"ampdbg report {name}; to rerun the script{', and capture a step' * (step > 0)}: "
        f"{script.again(record.environment, step)}"
    )


def _config(path: Path, record: Record | None, overrides: Sequence[str]) -> Config:
    from ampdbg.config.file import config_of_record, load_config

    if record is None:
        return load_config(path, overrides)
    if not record.config:
        raise ConfigError(f"{path}: {NO_CONFIG}")
    try:
        return config_of_record(record.config, str(path), Path(record.config_folder), overrides)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{NO_FOLDER}") from None


def _no_config(path: Path) -> str:
    file = path.as_posix()
    return (
        f"{path}: a Python file, not a config; try: ampdbg bisect --module {_quoted(path)}, or write a config, "
        f"such as config.yaml, with two lines:\n"
        f'  model: {{target: "{file}:build_model"}}\n'
        f'  data: {{target: "{file}:build_data"}}'
    )


def _overrides(**changes: Unpack[Changes]) -> tuple[str, ...]:
    """Return the changes as ``--set`` takes them; a change by name wins over ``overrides``."""
    keys = {"steps": "train.steps", "device": "train.device", "policy": "precision.policy", "seed": "train.seed"}
    if unknown := changes.keys() - Changes.__annotations__.keys():
        raise TypeError(f"got {', '.join(sorted(unknown))}; allowed: {', '.join(Changes.__annotations__)}")
    named = (f"{keys[name]}={value}" for name, value in _named(**changes).items())
    return (*changes.get("overrides", ()), *named)


def _named(**changes: Unpack[Changes]) -> dict[str, object]:
    return {name: value for name, value in changes.items() if name != "overrides" and value is not None}


def _quoted(path: str | Path) -> str:
    return shlex.quote(str(path))
