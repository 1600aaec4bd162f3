"""A NaN in one sample of one batch."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="data-nonfinite",
    verdict="other",
    step=2,
    phase="data",
    says=("sample 5", "[0]"),
    twin=("data.args.value=1.0",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def batches(value: float = float("nan")) -> list[Pair]:
    made = pairs(6)
    made[2][0][5, 1] = value
    return made
