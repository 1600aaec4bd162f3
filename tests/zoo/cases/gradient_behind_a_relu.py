"""A gradient overflows where a ReLU is closed: the zero that the ReLU makes of it is FP32's too."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(follows=("silent-overflow",), config={"precision": {"loss_scale": 1.0}})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.head = nn.Linear(2, 1)
        # The first unit is closed for every sample, and its weight in the head is large.
        nn.init.constant_(self.body.bias, 100.0)
        self.body.bias.data[0] = -100.0
        self.head.weight.data[0, 0] = 6e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.body(x)))
