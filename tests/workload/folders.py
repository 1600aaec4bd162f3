"""A user's folder for a test: Python files and a config, built into a workload."""

import textwrap
from pathlib import Path

import torch

from ampdbg.config.file import load_config
from ampdbg.workload.build import Workload, build_workload

CPU = torch.device("cpu")

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(x)


def batches(count=3):
    return [(torch.full((8, 4), float(i)), torch.zeros(8, dtype=torch.int64)) for i in range(count)]
"""

CONFIG = """\
model: {target: net.py:Net}
data: {target: net.py:batches}
loss: {target: torch.nn.functional:cross_entropy}
"""


def build(folder: Path, *overrides: str, config: str = CONFIG, **files: str) -> Workload:
    """Writes ``net.py`` and ``files`` (``name="source"`` for ``name.py``) into ``folder`` and builds the config.

    ``net`` is appended to the healthy ``net.py``.
    """
    (folder / "net.py").write_text(NET + textwrap.dedent(files.pop("net", "")))
    for name, source in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    (folder / "config.yaml").write_text(config)
    return build_workload(load_config(folder / "config.yaml", overrides), CPU)


def first_losses(workload: Workload) -> dict[str, torch.Tensor]:
    return workload.losses(next(workload.batches()))
