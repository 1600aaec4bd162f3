"""One sample of one batch is beyond what FP16 can hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="data-range",
    verdict="other",
    op="aten._to_copy.default",
    step=2,
    phase="data",
    says=("sample 5", "[0]", "200,000"),
    twin=("data.args.value=1.0",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).float().tanh().mean(dim=-1, keepdim=True)  # <- here


def batches(value: float = 2e5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(6)]
    made[2][0][5] = torch.tensor([value, -value, value, -value])
    return made


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)
