"""The backward of a custom Function squares a half tensor."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="gradient-overflow",
    verdict="precision",
    op="aten.mul.Tensor",
    phase="backward",
    follows=("scale-collapse",),
    twin=("model.args.size=1.0",),
)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1e-4

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        squared = x * x  # <- here
        return grad * squared * 1e-6


class Model(nn.Module):
    def __init__(self, size: float = 1000.0) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        nn.init.constant_(self.body.bias, size)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Cube.apply(self.body(x)))
