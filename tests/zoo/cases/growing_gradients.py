"""Gradients that double now and then: the loss scale follows them with one skip each, and loses nothing."""

import torch
import torch.nn.functional as F

from tests.zoo.case import Case, TwoLayers

CASE = Case(
    follows=("gradient-growth",), steps=60, config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}}}
)
Model = TwoLayers


def batches() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)
    return [(x, y, 2.0 ** (number // 8)) for number in range(60)]


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor, float]) -> torch.Tensor:
    x, y, growth = batch
    output = model(x)
    grown = output * growth + (output - output * growth).detach()
    return F.mse_loss(grown.float(), y)
