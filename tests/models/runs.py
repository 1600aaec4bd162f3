"""A model of this folder trained and diagnosed as ``ampdbg scan`` does it, from a config in a folder of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import ampdbg
from ampdbg.record.run import Record

LANGUAGE = "tests.models.language"
SIGHT_AND_SOUND = "tests.models.sight_and_sound"


@dataclass(frozen=True)
class Workload:
    """A model's factory and its batches', by name: nothing is imported before a test runs."""

    home: str
    model: str
    data: str
    args: Mapping[str, Any] = field(default_factory=dict)
    data_args: Mapping[str, Any] = field(default_factory=dict)
    loss: str | None = None

    def __str__(self) -> str:
        return "-".join([self.model, *(str(value) for value in self.args.values() if not isinstance(value, dict))])


def config_of(workload: Workload, folder: Path) -> Path:
    """A config that fine-tunes the model with AdamW at a learning rate of 1e-4."""
    config: dict[str, Any] = {
        "model": {"target": f"{workload.home}:{workload.model}", "args": dict(workload.args)},
        "data": {"target": f"{workload.home}:{workload.data}", "args": dict(workload.data_args)},
        "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 1.0e-4}},
    }
    if workload.loss is not None:
        config["loss"] = {"target": workload.loss}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def scanned(workload: Workload, folder: Path, steps: int, *overrides: str, seed: int = 0) -> Record:
    """The diagnosed record of so many steps."""
    return ampdbg.scan(config_of(workload, folder), steps=steps, seed=seed, device="cpu", overrides=overrides)
