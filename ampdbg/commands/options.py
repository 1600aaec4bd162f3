"""The options that commands share, as Typer reads them, and what they change in the config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ampdbg.given import Changes
from ampdbg.record.pins import Strategy
from ampdbg.record.run import RECORD_FORMAT

Policy = Literal["cuda", "native"]
FailOn = Literal["error", "warning", "never"]


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
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to train.")]
Device = Annotated[str | None, typer.Option("--device", metavar="auto|cpu|cuda[:i]", help="Where to run.")]
PolicyChoice = Annotated[
    Policy | None,
    typer.Option("--policy", help="cuda: CUDA's autocast op lists on any device; native: the device's own."),
]
SearchingChoice = Annotated[Strategy, typer.Option("--strategy", help="guided: by what overflows; ddmin: blind.")]
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
        help="Set any config key: dotted.key=YAML. Repeatable.",
    ),
]
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
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the report.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no hints on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
FailOnChoice = Annotated[FailOn, typer.Option("--fail-on", help="The least severity that makes the exit code 1.")]


def changes(
    steps: int | None, device: str | None, policy: Policy | None, seed: int | None, settings: Sequence[str] | None
) -> Changes:
    """What the options change in the config."""
    return {
        "overrides": settings or (),
        "steps": steps,
        "device": device,
        "policy": policy,
        "seed": seed,
    }
