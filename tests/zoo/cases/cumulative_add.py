"""Increments that are added up in half pass 65504."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.add.Tensor",
    step=0,
    twin=("model.args.increment=10.0",),
)


class Model(nn.Module):
    def __init__(self, increment: float = 9000.0) -> None:
        super().__init__()
        self.increment = increment
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        total = h
        for _ in range(10):
            total = total + (h.sigmoid() + self.increment)  # <- here
        return self.head(self.norm(total))
