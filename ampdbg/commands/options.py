"""The options that several commands share, as Typer reads them, and the config keys that they change."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ampdbg.errors import AmpdbgError, ConfigError
from ampdbg.files import obstacle
from ampdbg.given import Changes
from ampdbg.record.log import BEGINS
from ampdbg.record.pins import Strategy
from ampdbg.record.run import RECORD_FORMAT

PATCH = "patch of that form"

Known = Callable[[bytes], object]
"""Recognizes the content of a file that an option has written."""


def _is_of(name: str, there: bytes) -> bool:
    """True if the whole file is a JSON object of this format: a user's file may contain or quote a record."""
    try:
        data = json.loads(there)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == name


CONTENTS: Mapping[str, tuple[str, Known]] = {
    "record": ("record", functools.partial(_is_of, RECORD_FORMAT)),
    "text": ("report", re.compile("(✓|✗|\\?|!) ".encode()).match),
    "markdown": ("report in Markdown", re.compile("### (✓|✗|\\?|!) ".encode()).match),
    "html": ("HTML page", re.compile(rb"<!doctype html>\n<!-- A report of ampdbg ").match),
    "sarif": ("SARIF log", re.compile(rb'\{\s*"\$schema": "[^"]*sarif-schema').match),
    "diff": (PATCH, re.compile(rb"# (Keeps|The weights are) .*\n(#.*\n)*diff --git ").match),
    "module": (PATCH, re.compile(rb'# Keeps .*\n(#.*\n)*\n"""Keeps modules in FP32 ').match),
    "yaml": (PATCH, re.compile(rb"# Keeps .*\n(#.*\n)*precision:\n").match),
    "json": (PATCH, functools.partial(_is_of, "ampdbg.patch")),
    "log": ("log of a run", BEGINS.match),
}
"""The name of what each option writes, and how to recognize it in a file."""


def check_place(option: str, path: Path | None, content: str, **others: Path | None) -> None:
    """Refuse, before a run, a place where writing would wait without end or destroy the user's data.

    Args:
        option: the option as typed, for the message.
        path: the path given to the option, if any.
        content: the name in :data:`CONTENTS` of what the option writes.
        others: files that it must never overwrite, by what they are.

    Raises:
        ConfigError: the path is such a place.
    """
    if path is None:
        return
    if what_is_there := obstacle(path):
        raise ConfigError(f"{option} {path} is {what_is_there}; allowed: a file, or /dev/stdout")
    real = Path(os.path.realpath(path))  # a pipe that is stdout has no path of its own
    for what, other in others.items():
        if other is not None and real == Path(os.path.realpath(other)) and not path.is_char_device():
            is_what = f"is the file of the {what.replace('_', ' ')}"
            raise ConfigError(f"{option} {path} {is_what}, and would be overwritten; name another file")
    if os.path.isfile(path) and not _is_own(path, content):
        called = CONTENTS[content][0]
        raise ConfigError(f"{option} {path} holds no {called}, and would be overwritten; name another file")


def _is_own(path: Path, content: str) -> bool:
    """True if the file is empty, or an option with this ``content`` has written it before."""
    try:
        there = path.read_bytes()
    except OSError:
        return False
    return not there or bool(CONTENTS[content][1](there))


def _checked_record(value: Path | None) -> Path | None:
    check_place("--record", value, "record")
    return value


CONFIG_OR_RECORD = "A YAML config, or a record whose config to use; by default ampdbg.yaml."
DEFAULT_CONFIG = Path("ampdbg.yaml")
"""The file that ``ampdbg init`` writes."""

STEP = "A YAML config, a record, or the capture of a script's failing step"
OptionalConfig = Annotated[Path | None, typer.Argument(metavar="CONFIG", help=CONFIG_OR_RECORD, show_default=False)]
StepOrConfig = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help=f"{STEP}; by default ampdbg.yaml.", show_default=False)
]
ScriptToStart = Annotated[
    str,
    typer.Option(
        "--script",
        metavar="'SCRIPT ARGS...'",
        show_default=False,
        help="With a capture: start this command instead of the captured one.",
    ),
]
SearchingChoice = Annotated[
    Strategy, typer.Option("--strategy", help="guided: start from the ops that overflow; ddmin: ignore them.")
]
MaxTrials = Annotated[int | None, typer.Option("--max-trials", metavar="N", min=1, help="Run at most N trials.")]
RecordFile = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        dir_okay=False,
        callback=_checked_record,
        help="Write the record here, not into .ampdbg/.",
    ),
]
OutputFile = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", dir_okay=False, help="Write here instead of to stdout.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", dir_okay=False, help="Also write the report as one HTML page here."),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show everything that was found, not only the main finding.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]


def default_config(config: Path | None) -> Path | None:
    """Return the typed config, else the config of this folder, if there is one."""
    return DEFAULT_CONFIG if config is None and DEFAULT_CONFIG.is_file() else config


def config_or_default(config: Path | None) -> Path:
    """Return the typed config, else the config of this folder.

    Raises:
        ConfigError: there is neither.
    """
    found = default_config(config)
    if found is None:
        raise ConfigError(
            "Missing argument 'CONFIG', and this folder has no ampdbg.yaml; ampdbg init writes one, and ampdbg "
            "run SCRIPT needs none"
        )
    return found


@dataclass(frozen=True)
class RunOptions:
    """The options of every command that runs a workload, in the order of its help."""

    steps: Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to train.")] = None
    device: Annotated[str | None, typer.Option("--device", metavar="auto|cpu|cuda[:i]", help="Where to run.")] = None
    policy: Annotated[
        Literal["cuda", "native"] | None,
        typer.Option("--policy", help="cuda: CUDA's autocast op lists on any device; native: the device's own."),
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="The random seed.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any config key: dotted.key=YAML. Repeatable."),
    ] = None
    record: RecordFile = None
    html: HtmlFile = None
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the report.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress and no hints on stderr.")] = False
    verbose: Verbose = False

    @property
    def changes(self) -> Changes:
        return {
            "overrides": self.settings or (),
            "steps": self.steps,
            "device": self.device,
            "policy": self.policy,
            "seed": self.seed,
        }


OF_A_CONFIG = ("steps", "device", "policy", "seed", "settings")
"""The options that change a config."""


def with_run_options(command: Callable[..., int], but: Collection[str] = ()) -> Callable[..., int]:
    """Give a command the options of a run, which it takes as one argument ``run``; Typer reads them from the signature.

    An option of the command replaces the shared option of the same name; those in ``but`` are left out.
    """
    own = inspect.signature(command, eval_str=True)
    every = inspect.signature(RunOptions, eval_str=True).parameters
    shared = {name: option for name, option in every.items() if name not in own.parameters and name not in but}

    @functools.wraps(command)
    def typed(**options: Any) -> int:
        _check_folders()
        run = RunOptions(**{name: options[name] for name in shared})
        config, output = options.get("config"), options.get("output")
        check_place("--html", run.html, "html", record=run.record, config=config, output=output)
        options = {name: value for name, value in options.items() if name not in shared}
        return command(**options, run=run)

    given = [option for name, option in own.parameters.items() if name != "run"]
    vars(typed)["__signature__"] = own.replace(parameters=[*given, *shared.values()])
    return typed


def _check_folders() -> None:
    """Refuse to run in an environment where torch could not be imported."""
    try:
        os.getcwd()
    except OSError:
        raise AmpdbgError("the working folder is gone, or may not be entered; change to another one") from None
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise AmpdbgError(f"{error.strerror}; set TMPDIR to a folder that can be written") from None
