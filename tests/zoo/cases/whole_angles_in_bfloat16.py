"""Angles that are whole numbers up to 256, which bfloat16 holds exactly, far apart as its numbers are there."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(config={"precision": {"dtype": "bfloat16"}})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        angles = torch.arange(x.shape[1], device=x.device, dtype=h.dtype)
        return self.head(h + torch.stack([angles.sin(), angles.cos()] * 2, -1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(2, 200, 4, generator=torch.Generator().manual_seed(0))
    return [(x, x.sum(dim=-1, keepdim=True))]
