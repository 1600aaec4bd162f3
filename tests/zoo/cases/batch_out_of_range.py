"""One sample of one batch is beyond what FP16 can hold."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

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


def batches(value: float = 2e5) -> list[Pair]:
    made = pairs(6)
    made[2][0][5] = torch.tensor([value, -value, value, -value])
    return made
