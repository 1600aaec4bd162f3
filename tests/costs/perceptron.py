"""A small model in a folder, for which every byte of a step can be computed by hand."""

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
    """Writes the model and the config, and returns the path of the config."""
    (folder / "net.py").write_text(net, encoding="utf-8")
    (folder / "c.yaml").write_text(config, encoding="utf-8")
    return folder / "c.yaml"


def activations(size: int) -> int:
    """The bytes that autograd keeps besides weights, at ``size`` bytes for each number of the model.

    It keeps the input, the ReLU's result, which the second layer shares, and the operand of the square, in float32.
    """
    return BATCH * (WIDTH + HIDDEN) * size + BATCH * CLASSES * 4
