"""A weight so large that squares of what it makes are beyond FP32 too: not FP16 is the cause."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="unknown",
    verdict="other",
    module="",
    op="aten.mul.Tensor",
    step=0,
    phase="forward",
    follows=("scale-collapse",),
    says=("FP32 either", "3e30", "FP32's range"),
    twin=("model.args.gain=3.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 3e30) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((16,), gain))
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.head(self.body(x))
        squares = self.gain * self.gain  # <- here
        return h * squares.mean()
