"""A healthy model whose loss scale has to come down first."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(follows=("scale-calibration",), steps=12)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * 50.0
