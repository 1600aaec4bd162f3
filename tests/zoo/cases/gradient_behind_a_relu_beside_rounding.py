"""A gradient overflows where a ReLU is closed, and rounding alone leads all gradients further from FP32's than that.

The zero that the ReLU makes of it is FP32's too: at a lower loss scale, where nothing overflows, the gradients are the
same.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(follows=("silent-overflow",), config={"precision": {"loss_scale": 8.0}})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.head = nn.Linear(2, 1)
        self.coarse = nn.Linear(4, 8)
        # The first unit is closed for every sample, and its weight in the head is large.
        nn.init.constant_(self.body.bias, 100.0)
        self.body.bias.data[0] = -100.0
        self.head.weight.data[0, 0] = 6e4
        self.head.weight.data[0, 1] = 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (self.coarse(x) + 200.0) - 200.0  # to eighths
        return self.head(F.relu(self.body(x))) + (rounded * rounded).sum(-1, keepdim=True) * 0.3
