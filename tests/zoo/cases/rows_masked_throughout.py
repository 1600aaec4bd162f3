"""A softmax over a row of -inf is NaN in every precision: no overflow, though FP16 shows it first."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="true-nan", verdict="other", module="", op="aten._softmax.default", step=0, twin=("model.args.masked=2",)
)


class Model(nn.Module):
    def __init__(self, masked: int = 4) -> None:
        super().__init__()
        self.masked = masked
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)
        mask[3, : self.masked] = float("-inf")
        weights = (self.body(x) + mask).softmax(dim=-1)  # <- here
        return self.head(weights)
