"""Half parameters, trained with updates that they can hold."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    config={
        "precision": {"level": "O0"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9}},
    }
)


class Model(nn.Module):
    def __init__(self, half: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 1)
        if half:
            self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.to(self.body.weight.dtype)).relu())
