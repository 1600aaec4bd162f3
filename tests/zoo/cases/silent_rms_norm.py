"""An RMS norm whose mean of squares overflows returns zeros: nothing is infinite behind it."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="silent-overflow",
    verdict="precision",
    module="norm",
    op="aten.mul.Tensor",
    phase="forward",
    twin=("model.args.fp32=true",),
)


class RMSNorm(nn.Module):
    def __init__(self, fp32: bool) -> None:
        super().__init__()
        self.fp32 = fp32
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.fp32 else x
        squares = wide * wide  # <- here
        return self.weight * (wide * torch.rsqrt(squares.mean(dim=-1, keepdim=True) + 1e-6))


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        nn.init.constant_(self.body.bias, 500.0)
        self.norm = RMSNorm(fp32)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))
