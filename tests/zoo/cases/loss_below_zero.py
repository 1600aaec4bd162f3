"""A loss that falls below zero, as it should, when one batch overflows in FP16: what falls does not diverge."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.mul.Tensor",
    step=10,
    steps=14,
    config={"optimizer": {"target": "torch.optim:Adam", "args": {"lr": 0.1}}},
    twin=("data.args.spike=50.0",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    real, fake, spike = batch
    gain = (model(real) * 0 + 1) * spike.half()
    gain = gain * gain  # <- here
    return model(fake).float().mean() - model(real).float().mean() + 1e-12 * gain.float().mean()


def batches(spike: float = 1000.0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(14):
        real, fake = torch.randn(8, 4, generator=generator) + 1, torch.randn(8, 4, generator=generator)
        is_spike = number == 10
        scaled = 30.0 if is_spike else 1.0
        made.append((real * scaled, fake * scaled, torch.tensor(spike if is_spike else 1.0)))
    return made
