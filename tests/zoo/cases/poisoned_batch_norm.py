"""One batch overflows, its step is skipped, and the statistics of a BatchNorm stay infinite."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="body",
    step=3,
    follows=("buffer-poisoned",),
    twin=("data.args.spike=1.0",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        nn.init.constant_(self.body.weight, 0.5)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))  # <- here


def batches(spike: float = 60000.0) -> list[Pair]:
    made = pairs(6)
    made[3][0][2] = spike
    return made
