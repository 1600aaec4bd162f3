"""Half parameters: the eps of Adam is 0 there, and the first update divides by it."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="optimizer-underflow",
    verdict="other",
    phase="optimizer",
    step=0,
    says=("body.weight", "eps=1e-08 is 0 in half"),
    config={"precision": {"level": "O0"}, "optimizer": {"target": "torch.optim:Adam"}},
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
