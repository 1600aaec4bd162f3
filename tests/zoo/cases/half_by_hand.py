"""A sum in half that the code asks for itself, where autocast is disabled."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.sum.default",
    step=0,
    twin=("model.args.by_hand=false",),
)


class Model(nn.Module):
    def __init__(self, by_hand: bool = True) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        with torch.autocast(x.device.type, enabled=False):
            h = h.half() if self.by_hand else h.float()
            total = (h.abs() * 5000.0 + 5000.0).sum()  # <- here
            h = h.float() / total.float().log()
        return self.head(h) + 0.0 * total
