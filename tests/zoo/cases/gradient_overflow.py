"""A gradient that is beyond FP16 at every loss scale."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="gradient-overflow",
    verdict="precision",
    phase="backward",
    step=0,
    follows=("scale-collapse",),
    twin=("model.args.gain=1.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 1e6) -> None:
        super().__init__()
        self.gain = gain
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        return self.head(h) * 1.0


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1]) * model.gain  # <- here
