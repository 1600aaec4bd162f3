"""A residual add overflows while all children are finite."""

import torch
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
