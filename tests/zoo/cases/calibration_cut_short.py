"""A run that ends while its loss scale is still coming down."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(follows=("scale-calibration",), steps=6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        nn.init.constant_(self.head.weight, 0.001)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * 500.0
