"""A layer overflows from the first step on; the inverse of its square is 0: each loss is finite, and no gradient is."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="wide",
    step=0,
    phase="forward",
    follows=("scale-collapse",),
    twin=("model.args.gain=1.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 1e6) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.wide.bias.fill_(1.0).mul_(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.wide(x)  # <- here
        return self.head(1 / (1 + h * h))
