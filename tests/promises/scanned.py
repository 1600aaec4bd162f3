"""A scan of a small model, for tests of what native AMP promises in PyTorch's notes and examples.

What has its test elsewhere is not repeated: clipping, unscaling, the order of all calls, and every loop of the examples
as a healthy one in tests/zoo_misuse; custom_fwd and custom_bwd, checkpointing, code that says ``cuda`` in
tests/precision/test_code_for_cuda.py; the cache of weights in tests/precision/test_weight_cache.py; PyTorch's own
tests of its scaler while watched in tests/probes/test_scaling_parity.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ampdbg.config.file import load_config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.record.run import Record, Step
from ampdbg.training.loop import train


def config_of(folder: Path, code: str, **keys: Any) -> Path:
    """A config for ``code``, which defines ``Net``, ``data`` and ``step``; ``keys`` are more of it."""
    (folder / "work.py").write_text(code)
    targets = {
        key: {"target": f"work.py:{name}"} for key, name in (("model", "Net"), ("data", "data"), ("step", "step"))
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**targets, **keys}))
    return path


def scanned(folder: Path, code: str, **keys: Any) -> Record:
    """What a scan says of it."""
    return diagnose(train(load_config(config_of(folder, code, **keys))))


def nonfinite(step: Step) -> dict[str, tuple[int, int]]:
    """How many inf and NaN each parameter's gradient has."""
    return {counts.name: (counts.inf, counts.nan) for group in step.groups for counts in group.parameters}
