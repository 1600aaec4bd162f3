"""A likelihood of variance exp(-14): the gradients of its output pass half at every scale, those before it at some."""

import math

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="gradient-overflow",
    verdict="precision",
    step=0,
    phase="backward",
    steps=16,
    config={"precision": {"loss_scale": {"init": 4096.0}}},
    twin=("model.args.log_precision=0.0",),
)


class Model(nn.Module):
    def __init__(self, log_precision: float = 14.0) -> None:
        super().__init__()
        self.log_precision = log_precision
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.normal_(self.out.weight, std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(3)]


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, target = batch
    squares = (model(x).float() - target).square().sum(-1).mean()  # <- here
    return 0.5 * (math.exp(model.log_precision) * squares - model.log_precision)
