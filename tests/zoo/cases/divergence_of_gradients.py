"""A linear model that diverges: the gradients overflow while the loss is finite."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="divergence",
    verdict="other",
    steps=40,
    config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 1.5}}},
    twin=("optimizer.args.lr=0.05",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)
