"""A static loss scale so low that half flushes gradients of some layers, which are a small share of all energy."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="gradient-underflow",
    verdict="precision",
    config={"precision": {"loss_scale": 2.0**-18}},
    twin=("precision.loss_scale=1024",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.head(h + 0.1 * torch.relu(self.second(h)))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 16, generator=generator), torch.randn(16, 4, generator=generator)) for _ in range(3)]
