"""One batch of many takes the square root of a negative number."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(code="true-nan", verdict="other", op="aten.sqrt.default", step=2, twin=("data.args.offset=2.0",))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.sqrt())  # <- here


def batches(offset: float = -2.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [(torch.rand(8, 4, generator=generator) + 2, torch.randn(8, 1, generator=generator)) for _ in range(6)]
    made[2][0][4] = offset
    return made
