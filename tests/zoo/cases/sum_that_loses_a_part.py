"""A running sum in half loses an eighth of what it should come to: the loss hardly differs, and the gradients do."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="precision-loss",
    verdict="precision",
    module="",
    op="aten.add.Tensor",
    phase="forward",
    severity="warning",
    config={"precision": {"loss_scale": 16}},
    twin=("model.args.fp32=true",),
)


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.fp32 = fp32
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).sigmoid()
        total = h.float() if self.fp32 else h
        small = total * 2e-4
        for _ in range(700):
            total = total + small  # <- here
        return self.head(total)
