"""One head overflows above the loss scale that the other needs."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="no-usable-scale",
    verdict="precision",
    phase="backward",
    steps=18,
    config={"optimizer": {"target": "torch.optim:Adam", "args": {"lr": 0.0}}},
    twin=("model.args.large=1.0", "model.args.small=1.0"),
)


class Model(nn.Module):
    def __init__(self, large: float = 3e4, small: float = 1e-10) -> None:
        super().__init__()
        self.large, self.small = large, small
        self.first = nn.Linear(4, 1)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.large  # <- here


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = batch
    return {"first": (model(x).float() - y).mean(), "second": F.mse_loss(model.second(x), y) * model.small}
