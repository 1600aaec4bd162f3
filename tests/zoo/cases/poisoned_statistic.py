"""A running statistic overflows in half beside the model: no loss and no gradient shows it."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="buffer-poisoned",
    verdict="precision",
    module="monitor",
    op="aten.mul.Tensor",
    follows=("silent-overflow",),
    twin=("model.args.size=1.0",),
)


class Monitor(nn.Module):
    power: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("power", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            squares = x * x  # <- here
            self.power.mul_(0.9).add_(squares.mean(dim=0).float(), alpha=0.1)
        return x


class Model(nn.Module):
    def __init__(self, size: float = 500.0) -> None:
        super().__init__()
        self.size = size
        self.body = nn.Linear(4, 4)
        self.monitor = Monitor()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.monitor(self.body(x) * self.size)))
