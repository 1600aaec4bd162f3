"""Workloads of a few lines, written beside a config of their own."""

from pathlib import Path
from typing import Any

import yaml

from ampdbg.config.file import load_config
from ampdbg.config.schema import Config

TARGETS = ("model", "data", "loss", "step", "optimizer", "scheduler")


def written(folder: Path, code: str, *overrides: str, **keys: Any) -> Config:
    """The config of these keys, whose workload is this code.

    A target may be its mere name, in the code or with its module, or the name and the arguments.
    """
    (folder / "work.py").write_text(code, encoding="utf-8")
    spec = {key: _target(value) if key in TARGETS else value for key, value in keys.items() if value is not None}
    (folder / "config.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    return load_config(folder / "config.yaml", overrides)


def _target(given: Any) -> Any:
    name, arguments = given if isinstance(given, tuple) else (given, {})
    if isinstance(name, dict):
        return name
    return {"target": name if ":" in name else f"work.py:{name}", "args": arguments}
