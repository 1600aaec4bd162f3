"""The overflow comes in the second of three accumulated micro-batches."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="body",
    step=0,
    config={"train": {"accumulate": 3}},
    twin=("data.args.spike=1.0",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        nn.init.constant_(self.body.weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean(dim=-1, keepdim=True)  # <- here


def batches(spike: float = 40000.0) -> list[Pair]:
    made = pairs()
    made[1][0][2] = spike
    return made


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(output, target)
