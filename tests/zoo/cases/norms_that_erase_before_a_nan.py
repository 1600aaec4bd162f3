"""Norms whose overflow erases itself, in every layer but one: that one makes the loss NaN, and is the cause."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(code="forward-overflow", verdict="precision", module="layers.4", step=0, twin=("model.args.gain=1.0",))


class Layer(nn.Module):
    def __init__(self, gain: float, size: float) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)
        self.gain, self.size = gain, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.value(x) * self.size
        normal = value * (value * value).mean(dim=-1, keepdim=True).add(1.0).rsqrt().detach()
        scores = (normal * self.gain) @ (normal * self.gain).transpose(1, 2)  # <- here
        return x + 0.01 * (scores - scores.amax(dim=-1, keepdim=True)).exp() @ normal


class Model(nn.Module):
    def __init__(self, gain: float = 300.0) -> None:
        super().__init__()
        size = 2.0 * gain
        layers = [Layer(gain, 1.0) if index == 4 else Layer(1.0, size) for index in range(6)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batches() -> list[Pair]:
    return pairs(3, (2, 6), 8)
