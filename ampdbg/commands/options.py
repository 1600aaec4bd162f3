"""The options that commands share, as Typer reads them, and what they change in the config."""

from __future__ import annotations

import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ampdbg.errors import AmpdbgError
from ampdbg.given import Changes
from ampdbg.record.pins import Strategy
from ampdbg.record.run import RECORD_FORMAT


def _checked_record(value: Path | None) -> Path | None:
    if value is not None and _holds_something_else(value):
        raise typer.BadParameter(f"{value} holds no record, and would be overwritten; name another file")
    return value


def _holds_something_else(path: Path) -> bool:
    """Whether a record written there would take the place of what is no record: a config, say."""
    try:
        if not path.is_file() or not path.stat().st_size:
            return False
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return path.is_file()
    return not isinstance(data, dict) or data.get("format") != RECORD_FORMAT


CONFIG_OR_RECORD = "The YAML config of the run, or a record, whose config is run again."
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help=CONFIG_OR_RECORD, show_default=False)]
OptionalConfig = Annotated[Path | None, typer.Argument(metavar="CONFIG", help=CONFIG_OR_RECORD, show_default=False)]
SearchingChoice = Annotated[Strategy, typer.Option("--strategy", help="guided: by what overflows; ddmin: blind.")]
MaxTrials = Annotated[int | None, typer.Option("--max-trials", metavar="N", min=1, help="Make at most N experiments.")]
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
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


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
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the report.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no hints on stderr.")] = False
    debug: Debug = False

    @property
    def changes(self) -> Changes:
        """What they change in the config."""
        return {
            "overrides": self.settings or (),
            "steps": self.steps,
            "device": self.device,
            "policy": self.policy,
            "seed": self.seed,
        }


def with_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options of a run, which it takes as one argument ``run``; Typer reads them off a signature.

    An option of the command's own stands in the place of the one of the same name.
    """
    own = inspect.signature(command, eval_str=True)
    every = inspect.signature(RunOptions, eval_str=True).parameters
    shared = {name: option for name, option in every.items() if name not in own.parameters}

    @functools.wraps(command)
    def typed(**options: Any) -> int:
        _check_folders()
        run = RunOptions(**{name: options.pop(name) for name in shared})
        return command(**options, run=run)

    given = [option for name, option in own.parameters.items() if name != "run"]
    vars(typed)["__signature__"] = own.replace(parameters=[*given, *shared.values()])
    return typed


def _check_folders() -> None:
    """Refuses to run where torch itself could not be imported."""
    try:
        os.getcwd()
    except OSError:
        raise AmpdbgError("the working folder is gone, or may not be entered; change to another one") from None
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise AmpdbgError(f"{error.strerror}; set TMPDIR to a folder that can be written") from None
