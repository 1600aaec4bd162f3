"""Activations are clamped to the largest number of half, and the residual add goes beyond it."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow", verdict="precision", module="", op="aten.add.Tensor", step=0, twin=("model.args.bias=1.0",)
)


class Model(nn.Module):
    def __init__(self, bias: float = 65000.0) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 1)
        nn.init.constant_(self.body.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        limit = torch.finfo(torch.float16).max
        h = torch.where(h > 60000.0, torch.full_like(h, limit), h).clamp(-limit, limit)
        h = h + h  # <- here
        return self.head(h) * 1e-4
