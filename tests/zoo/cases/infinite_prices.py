"""The loss is infinite and its gradient a sign: no step is ever skipped."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow", verdict="precision", module="", op="aten.mul.Tensor", step=0, twin=("model.args.unit=1.0",)
)


class Model(nn.Module):
    def __init__(self, unit: float = 10000.0) -> None:
        super().__init__()
        self.unit = unit
        self.head = nn.Linear(4, 1)
        nn.init.constant_(self.head.bias, 9.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * self.unit  # <- here


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output.float() - target) / 10000.0).abs().mean()
