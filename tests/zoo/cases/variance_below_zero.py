"""A variance as the mean of squares less the square of the mean: in half it falls below zero, and its root is NaN."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="precision-loss",
    verdict="precision",
    module="norm",
    op="aten.sqrt.default",
    step=0,
    phase="forward",
    says=("below zero in FP16 and not in FP32",),
    twin=("model.args.fp32=true",),
)


class Norm(nn.Module):
    def __init__(self, fp32: bool) -> None:
        super().__init__()
        self.fp32 = fp32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.fp32 else x
        mean = wide.mean(-1, keepdim=True)
        variance = (wide * wide).mean(-1, keepdim=True) - mean * mean
        return (wide - mean) / (variance + 1e-5).sqrt()  # <- here


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 32)
        nn.init.constant_(self.body.bias, 40.0)
        self.norm = Norm(fp32)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))
