"""A mask in each of thirty layers, and behind all of them a product that overflows: the masks are harmless."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(code="forward-overflow", verdict="precision", module="layers.28", step=0, twin=("model.args.gain=1.0",))


class Layer(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        value = self.value(x)
        scores = value @ value.transpose(1, 2) + ((1.0 - mask) * -1e9).to(value.dtype)
        read = F.layer_norm(scores.softmax(dim=-1).to(value.dtype) @ value, (8,)).half() * self.gain
        energy = read @ read.transpose(1, 2)  # <- here
        return x + 0.01 * (energy.float() / self.gain**2).mean(dim=-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, gain: float = 300.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(gain if index == 28 else 1.0) for index in range(30))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def batches() -> list[Pair]:
    return pairs(3, (2, 6), 8)
