"""A constant that half cannot hold is filled into scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="mask-constant",
    verdict="other",
    step=0,
    twin=("model.args.fill=-10000.0",),
)


class Model(nn.Module):
    def __init__(self, fill: float = -1e9) -> None:
        super().__init__()
        self.fill = fill
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.body(x)
        scores = scores.masked_fill(x > 1, self.fill)  # <- here
        return self.head(scores.softmax(dim=-1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(3)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)
