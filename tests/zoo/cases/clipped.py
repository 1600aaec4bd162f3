"""One head of two overflows and gradients are clipped: by an infinite norm, which makes a NaN of every group."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="gradient-overflow",
    verdict="precision",
    step=0,
    phase="backward",
    follows=("scale-collapse",),
    config={"train": {"clip_grad_norm": 1.0}},
    twin=("model.args.gain=1.0",),
)
GROUPS = {"second.weight": (4, 0), "second.bias": (1, 0)}
"""The inf and NaN that each group holds before the clipping."""


class Model(nn.Module):
    def __init__(self, gain: float = 1e6) -> None:
        super().__init__()
        self.gain = gain
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(8, 4, generator=generator) + 0.1, torch.randn(8, 1, generator=generator)) for _ in range(3)]


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = model(batch[0])
    return F.mse_loss(first.float(), batch[1]) + second.float().mean() * model.gain  # <- here
