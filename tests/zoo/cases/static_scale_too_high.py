"""A static loss scale at which every step overflows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="scale-calibration",
    verdict="other",
    phase="backward",
    config={"precision": {"loss_scale": 65536}},
    twin=("precision.loss_scale=1",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * 50.0


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)  # <- here
