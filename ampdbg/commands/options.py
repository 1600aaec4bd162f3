"""The options that commands share, as Typer reads them, and what they change in the config."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Policy(str, Enum):
    """Whose autocast op lists apply."""

    cuda = "cuda"
    native = "native"


class Searching(str, Enum):
    """How a set of modules is searched for."""

    guided = "guided"
    ddmin = "ddmin"


class FailOn(str, Enum):
    """The least severity that makes the exit code 1."""

    error = "error"
    warning = "warning"
    never = "never"


def _checked_device(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} is not a device; allowed: auto, cpu, cuda, cuda:0, cuda:1, ...")
    return value


def _checked_settings(values: list[str] | None) -> list[str]:
    for value in values or []:
        if not value.partition("=")[0].strip() or "=" not in value:
            raise typer.BadParameter(f"{value!r} sets nothing; write it as dotted.key=value, as in train.steps=5")
    return values or []


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML config of the run.", show_default=False)]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to train.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="auto|cpu|cuda[:i]", callback=_checked_device, help="Where to run.")
]
PolicyChoice = Annotated[
    Policy | None,
    typer.Option("--policy", help="cuda: CUDA's autocast op lists on any device; native: the device's own."),
]
SearchingChoice = Annotated[Searching, typer.Option("--strategy", help="guided: by what overflows; ddmin: blind.")]
MaxTrials = Annotated[int | None, typer.Option("--max-trials", metavar="N", min=1, help="Make at most N experiments.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The random seed.")]
Replays = Annotated[
    int,
    typer.Option("--replays", metavar="N", min=0, help="Replay at most N unhealthy steps of each kind; 0 for none."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        callback=_checked_settings,
        help="Set any config key: dotted.key=YAML. Repeatable.",
    ),
]
RecordFile = Annotated[
    Path | None,
    typer.Option("--record", metavar="FILE", dir_okay=False, help="Write the record here, not into .ampdbg/."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the report.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no hints on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
FailOnChoice = Annotated[FailOn, typer.Option("--fail-on", help="The least severity that makes the exit code 1.")]


def as_overrides(
    steps: int | None, device: str | None, policy: str | None, seed: int | None, settings: Sequence[str]
) -> tuple[str, ...]:
    """The options as config overrides, ``dotted.key=value``; an option of its own name wins over ``--set``."""
    named = {"train.steps": steps, "train.device": device, "precision.policy": policy, "train.seed": seed}
    return (*settings, *(f"{key}={value}" for key, value in named.items() if value is not None))


def as_typed(
    given: str, steps: int | None, device: str | None, policy: Policy | None, seed: int | None, settings: Sequence[str]
) -> str:
    """``given``, which is quoted for a shell already, and behind it the options that change the run."""
    named = {"--steps": steps, "--device": device, "--policy": policy.value if policy else None, "--seed": seed}
    pairs = [("--set", setting) for setting in settings]
    pairs += [(option, str(value)) for option, value in named.items() if value is not None]
    return " ".join([given, *(f"{option} {shlex.quote(value)}" for option, value in pairs)])
