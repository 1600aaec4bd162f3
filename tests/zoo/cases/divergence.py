"""A learning rate that diverges in FP32 too; FP16 only overflows first."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="divergence",
    verdict="other",
    steps=30,
    config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 3.0}}},
    twin=("optimizer.args.lr=0.05",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))
