"""A residual add overflows while all children are finite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="block",
    op="aten.add.Tensor",
    step=0,
    phase="forward",
    follows=("scale-collapse",),
    twin=("model.args.size=10.0",),
)


class Block(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        for linear in (self.first, self.second):
            nn.init.constant_(linear.weight, 0.01)
            nn.init.constant_(linear.bias, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)  # <- here


class Model(nn.Module):
    def __init__(self, size: float = 40000.0) -> None:
        super().__init__()
        self.block = Block(size)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(3)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)
