"""Nothing runs in half, so the loss scale grows without bound."""

import torch
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
