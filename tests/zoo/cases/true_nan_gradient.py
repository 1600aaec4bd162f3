"""The square root of zero has an infinite derivative, in every precision."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="true-nan",
    verdict="other",
    step=0,
    phase="backward",
    follows=("scale-collapse",),
    says=("step 4 was replayed, and every step from 0 on was skipped",),
    twin=("model.args.clamp=0.01",),
)


class Model(nn.Module):
    def __init__(self, clamp: float = 0.0) -> None:
        super().__init__()
        self.clamp = clamp
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).relu() * 0.0
        length = (h.square().sum(dim=-1, keepdim=True) + self.clamp).sqrt()  # <- here
        return self.head(length)
