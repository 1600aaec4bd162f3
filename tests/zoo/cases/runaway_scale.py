"""Nothing runs in half, so the loss scale grows without bound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="scale-runaway",
    verdict="other",
    severity="warning",
    phase="backward",
    steps=20,
    config={"precision": {"loss_scale": {"growth_interval": 1}}},
    twin=("precision.loss_scale.growth_interval=2000",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(3)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)
