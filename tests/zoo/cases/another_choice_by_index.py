"""Half precision matches outputs and targets otherwise than FP32, as DETR's matcher does near ties: none is worse."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    follows=("precision-loss",), steps=12, config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}}}
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cost = torch.ones(1, 2049, device=x.device) @ torch.ones(2049, 1, device=x.device)
        first = (cost > 2048.5).long().reshape(-1)  # half has 2048 and 2050
        return torch.stack([row(x).float() for row in self.rows]), torch.cat([first, 1 - first])


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    output, matched = model(x)
    return 300.0 + (output - torch.stack([y, -y])[matched]).square().mean()
