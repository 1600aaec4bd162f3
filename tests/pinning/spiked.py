"""A workload in its own file, in which some layers or the loss overflow; and the check of a found set."""

from pathlib import Path

from ampdbg.config.schema import Config
from ampdbg.record.run import Record
from tests.written import written

NET = """\
import torch
import torch.nn.functional as F
from torch import nn


class Spike(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain, self.weight = gain, nn.Parameter(torch.eye(8))

    def forward(self, x):
        return (self.gain**2 * x) @ self.weight / self.gain**2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Spike(1.0), Spike(300.0), Spike(1.0), Spike(300.0))

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

CULPRITS = (1, 3)
"""The layers that overflow."""


def spiked(folder: Path, loss: str = "loss") -> Config:
    """The workload, written into ``folder``."""
    precision, train = {"loss_scale": {"init": 1024.0}}, {"steps": 1}
    return written(folder, NET, model="Net", data="batches", loss=loss, precision=precision, train=train)


def names(*culprits: int) -> tuple[str, ...]:
    """The qualified names of layers."""
    return tuple(f"layers.{culprit}" for culprit in culprits)


def assert_found(record: Record, *names: str) -> None:
    """Asserts that the set has these names, is minimal, and is proven on further batches."""
    search = record.search
    assert search is not None
    assert (search.outcome, search.message, search.minimal) == ("found", "", True)
    assert tuple(pin.name for pin in record.pins) == names
    assert (search.further, search.further_healthy) == (3, 3)
