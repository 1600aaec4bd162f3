"""A weight is NaN before the first step."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="weights-nonfinite",
    verdict="other",
    step=0,
    follows=("scale-collapse",),
    says=("body.weight",),
    twin=("model.args.value=1.0",),
)


class Model(nn.Module):
    def __init__(self, value: float = float("nan")) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        with torch.no_grad():
            self.body.weight[1, 2] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))
