"""Half precision makes another choice than FP32: a branch gets no gradient, at any loss scale, and none was flushed."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(steps=12, config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}}})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.chosen = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = torch.ones(1, 2049, device=x.device) @ torch.ones(2049, 1, device=x.device)
        is_chosen = (score > 2048.5).float()  # half has 2048 and 2050
        return self.always(x).float() * 300.0 + self.chosen(x).float() * is_chosen * 0.01


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).sum()
