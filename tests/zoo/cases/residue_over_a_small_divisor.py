"""A gradient that is zero but for rounding, divided by a small number: too large at first, and right at a lower scale.

What is added to all logits alike does not move their softmax. Nothing that is divided by has rounded to zero.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(follows=("scale-calibration",), steps=8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x) * 0.02 + 1.0
        centred = h - h.mean(1, keepdim=True)
        variance = (centred * centred).mean(1, keepdim=True) * 1e-3
        return self.head(centred * 20) + 300 * (variance + 1e-9).sqrt()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(4)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)
