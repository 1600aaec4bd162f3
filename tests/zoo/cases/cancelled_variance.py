"""A variance cancels to zero in half: one over it is far larger than in FP32, and a later cast overflows."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="eps-underflow",
    verdict="precision",
    module="norm",
    op="aten.reciprocal.default",
    step=0,
    phase="forward",
    says=("where FP32 has",),
    twin=("model.args.fp32=true",),
)


class Norm(nn.Module):
    def __init__(self, fp32: bool) -> None:
        super().__init__()
        self.fp32 = fp32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.fp32 else x
        mean = wide.mean(dim=-1, keepdim=True)
        variance = (wide * wide).mean(dim=-1, keepdim=True) - mean * mean
        inverse = (variance.clamp_min(0.0).float() + 1e-8).reciprocal()  # <- here
        return (wide - mean).float() * inverse


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        nn.init.constant_(self.body.weight, 0.0)
        self.body.bias.data.copy_(torch.tensor([100.0, 100.0625, 100.0, 100.125]))
        self.norm = Norm(fp32)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))
