"""A small model in a folder, of which every byte of a step can be reckoned by hand."""

from pathlib import Path

BATCH, WIDTH, HIDDEN, CLASSES = 8, 16, 32, 4

NET = f"""\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear({WIDTH}, {HIDDEN}), nn.Linear({HIDDEN}, {CLASSES})

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, {BATCH}, {WIDTH}, generator=generator).unbind() for _ in range(4)]


def step(model, batch):
    return (model(batch[0]).float() ** 2).mean()
"""

CONFIG = """\
model: {target: net.py:Net}
data: {target: net.py:batches}
step: {target: net.py:step}
train: {steps: 4, device: cpu}
"""

PARAMETERS = (WIDTH + 1) * HIDDEN + (HIDDEN + 1) * CLASSES


def written(folder: Path, net: str = NET, config: str = CONFIG) -> Path:
    """The path of the config."""
    (folder / "net.py").write_text(net, encoding="utf-8")
    (folder / "c.yaml").write_text(config, encoding="utf-8")
    return folder / "c.yaml"


def activations(size: int) -> int:
    """What autograd keeps but for weights, where a number of the model takes ``size`` bytes.

    The input, the ReLU's result, which the second layer keeps too, and what is squared, which is float32.
    """
    return BATCH * (WIDTH + HIDDEN) * size + BATCH * CLASSES * 4
