"""Short workloads, each written into a folder with its config."""

from pathlib import Path
from typing import Any

import yaml

from ampdbg.config.file import load_config
from ampdbg.config.schema import Config

TARGETS = ("model", "data", "loss", "step", "optimizer", "scheduler")


def written(folder: Path, code: str, *overrides: str, **keys: Any) -> Config:
    """The config with these keys and this code as workload.

    A target is a name in the code, a name with its module, or a tuple of such a name and its arguments.
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
