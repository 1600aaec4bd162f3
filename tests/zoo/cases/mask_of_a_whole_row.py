"""A mask of -1e9 is minus infinity in half, and a row that is masked throughout turns NaN."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(code="mask-constant", verdict="other", op="aten.mul.Tensor", step=0, twin=("model.args.fill=-10000.0",))


class Model(nn.Module):
    def __init__(self, fill: float = -1e9) -> None:
        super().__init__()
        self.fill = fill
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.body(x)
        hidden = torch.zeros_like(scores)
        hidden[3] = 1.0
        mask = hidden * self.fill  # <- here
        return self.head((scores + mask).softmax(dim=-1))
