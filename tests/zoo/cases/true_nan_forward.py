"""The logarithm of zero times zero is NaN, in every precision."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(code="true-nan", verdict="other", op="aten.log.default", step=0, twin=("model.args.clamp=1.0e-4",))


class Model(nn.Module):
    def __init__(self, clamp: float = 0.0) -> None:
        super().__init__()
        self.clamp = clamp
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.body(x).relu()
        entropy = p * p.clamp(min=self.clamp).log()  # <- here
        return self.head(entropy)
