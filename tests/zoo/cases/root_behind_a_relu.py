"""A root's ``eps`` rounds to zero, and its gradient is infinite where a ReLU is closed, which makes a zero of it.

No loss scale holds that gradient, and rounding alone leads the others further from FP32's than 0.05; yet none of them
would be another one with a finite number in its place.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(follows=("silent-overflow",), config={"precision": {"loss_scale": 1024.0}})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.head = nn.Linear(2, 1)
        self.coarse = nn.Linear(4, 8)
        # The first unit is closed for every sample.
        nn.init.constant_(self.body.bias, 4.0)
        self.body.bias.data[0] = -100.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (self.coarse(x) + 200.0) - 200.0  # to eighths
        root = torch.sqrt(F.relu(self.body(x)) + 1e-8)
        return self.head(root) + (rounded * rounded).sum(-1, keepdim=True) * 0.3
