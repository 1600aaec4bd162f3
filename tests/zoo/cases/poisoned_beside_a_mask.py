"""A statistic of a BatchNorm stays infinite after a skipped step, in a model that has a mask of -inf as a buffer."""

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
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        nn.init.constant_(self.body.weight, 0.5)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, float("-inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.body(x))  # <- here
        return self.head((h + self.mask).softmax(dim=-1))


def batches(spike: float = 60000.0) -> list[Pair]:
    made = pairs(6)
    made[3][0][2] = spike
    return made
