"""Half parameters: every update is smaller than half a unit in the last place of its weight."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="optimizer-underflow",
    verdict="other",
    phase="optimizer",
    says=("6 steps lose", "of the updates' energy"),
    config={"precision": {"level": "O0"}, "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 1e-5}}},
    twin=("precision.level=O1", "model.args.half=false"),
)


class Model(nn.Module):
    def __init__(self, half: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 1)
        if half:
            self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.to(self.body.weight.dtype)).relu())
