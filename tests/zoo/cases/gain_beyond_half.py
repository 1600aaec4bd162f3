"""Activations are multiplied by a number that half cannot hold: a product that overflows, and no mask."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.mul.Tensor",
    step=0,
    phase="forward",
    says=("FP16's limit of 65,504",),
    twin=("model.args.gain=100.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 1e5) -> None:
        super().__init__()
        self.gain = gain
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).relu() * self.gain  # <- here
        return self.head(hidden)
