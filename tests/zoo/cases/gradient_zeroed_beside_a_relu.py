"""A gradient overflows where a ReLU is closed, which is harmless, and a larger one where a hook makes a zero of it that
FP32 does not have."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="silent-overflow",
    verdict="precision",
    phase="backward",
    config={"precision": {"loss_scale": 8.0}},
    twin=("precision.loss_scale=0.25",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.head = nn.Linear(2, 1)
        self.coarse = nn.Linear(4, 8)
        self.tail = nn.Linear(4, 1)
        # The first unit is closed for every sample, and its weight in the head is large.
        nn.init.constant_(self.body.bias, 100.0)
        self.body.bias.data[0] = -100.0
        self.head.weight.data[0, 0] = 4e4
        self.head.weight.data[0, 1] = 1e-3
        nn.init.uniform_(self.tail.weight, -1e-2, 1e-2)
        nn.init.zeros_(self.tail.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (self.coarse(x) + 300.0) - 300.0  # to quarters
        tail = self.tail(x)
        if tail.requires_grad:
            tail.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0) / 2.0**14)
        closed = self.head(F.relu(self.body(x)))
        tail = tail * 6e4  # <- here
        return closed + (rounded * rounded).sum(-1, keepdim=True) * 0.1 + tail - tail.detach()
