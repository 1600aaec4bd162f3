"""A workload in files of its own: layers of which some overflow, as a source beside them says, or the loss does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ampdbg.config import Config, load_config
from ampdbg.pinning.bisection import bisect_run
from ampdbg.record.pins import Trial
from ampdbg.record.run import Record
from tests.observing import observing

NET = """\
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import gains

READ = [float(gain) for gain in Path(__file__).with_name("gains.txt").read_text().split()]


class Spike(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain, self.weight = gain, nn.Parameter(torch.eye(8))

    def forward(self, x):
        return (self.gain**2 * x) @ self.weight / self.gain**2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Spike(here * read) for here, read in zip(gains.GAINS, READ)))

    def forward(self, x):
        return self.layers(x)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=generator), torch.randn(16, 8, generator=generator)) for _ in range(4)]


def loss(output, target):
    return F.mse_loss(output.float(), target)


def loss_with_a_spike(output, target):
    return loss(output, target) + 1e-8 * ((300.0 * output).t() @ (300.0 * output)).mean()
"""

CONFIG = """\
model: {target: source/net.py:Net}
data: {target: source/net.py:batches}
loss: {target: source/net.py:LOSS}
precision: {loss_scale: {init: 1024.0}}
train: {steps: 1}
"""

CULPRITS = (1, 3)
"""The layers that overflow as it is written."""


def spiked(folder: Path, loss: str = "loss") -> Config:
    """The workload, written into ``folder``; the sources lie in a folder of their own."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "net.py").write_text(NET)
    (source / "gains.txt").write_text("1.0 " * 4)
    write_culprits(folder, *CULPRITS)
    (folder / "config.yaml").write_text(CONFIG.replace("LOSS", loss))
    return load_config(folder / "config.yaml")


def write_culprits(folder: Path, *culprits: int) -> None:
    """Says in the source which of the four layers overflow."""
    gains = [300.0 if layer in culprits else 1.0 for layer in range(4)]
    (folder / "source" / "gains.py").write_text(f"GAINS = {gains}\n")


def names(*culprits: int) -> tuple[str, ...]:
    """The qualified names of layers."""
    return tuple(f"layers.{culprit}" for culprit in culprits)


def interrupted_at(number: int, config: Config, **kwargs: Any) -> Record:
    """A search with Ctrl-C at the end of the trial of this number, counted from 1."""
    left = iter(range(number - 1, -1, -1))

    def count(trial: Trial) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    return bisect_run(config, observer=observing(trial=count), **kwargs)


def told(record: Record) -> str:
    """All that a search has found, without times; as text, since NaN is not equal to itself."""
    assert record.search is not None
    trials = [replace(trial, seconds=0.0) for trial in record.trials]
    return "\n".join(map(repr, (record.interrupted, replace(record.search, step_seconds={}), *record.pins, *trials)))
