"""A constant that half cannot hold is filled into scores."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(code="mask-constant", verdict="other", module="attn", step=0, twin=("model.args.fill=-10000.0",))


class Attention(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        scores = scores.masked_fill(hidden, self.fill)  # <- here
        return scores.softmax(dim=-1)


class Model(nn.Module):
    def __init__(self, fill: float = -1e9) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.attn = Attention(fill)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attn(self.body(x), x > 1))
