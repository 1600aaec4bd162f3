"""A warm-up that starts at a learning rate of 0: hard batches take turns with easy ones, and one overflows in FP16."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.mul.Tensor",
    step=5,
    steps=8,
    config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}}},
    twin=("data.args.spike=1.0",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, target, spike = batch
    output = model(x)
    gain = (output + 1) * spike.half()
    gain = gain * gain  # <- here
    return F.mse_loss(output.float(), target) + 1e-12 * gain.float().mean()


def batches(spike: float = 3000.0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(8):
        target = torch.randn(8, 1, generator=generator) * (0.05 if number % 3 == 0 else 20.0)
        made.append((torch.randn(8, 4, generator=generator), target, torch.tensor(spike if number == 5 else 1.0)))
    return made
