"""Prices as whole numbers, some columns of which the model casts and repeats: they are the batch still."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="data-range",
    verdict="other",
    module="head",
    op="aten._to_copy.default",
    step=0,
    phase="data",
    says=("sample", "[0]"),
    twin=("data.args.highest=1000",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = x[:, :3].double().float().repeat(1, 2)
        return self.head(columns) * 1e-5  # <- here


def batches(highest: int = 300000) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [(torch.randint(highest, (8, 4), generator=generator), torch.randn(8, 1)) for _ in range(3)]
    for prices, _ in made:
        prices[2, 3] = 2 * highest
    return made
