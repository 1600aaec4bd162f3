"""A ``where`` leaves the root of negative numbers out, and its gradient is NaN; one of -inf and 0 beside it is not."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="true-nan",
    verdict="other",
    module="",
    op="aten.sqrt.default",
    phase="forward",
    follows=("scale-collapse",),
    twin=("model.args.lowest=0.01",),
)


class Model(nn.Module):
    def __init__(self, lowest: float = -9.0) -> None:
        super().__init__()
        self.lowest = lowest
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).float()
        places = torch.arange(4.0, device=x.device).log()  # -inf, which the next line leaves out
        h = h + torch.where(places.isinf(), torch.zeros_like(places), places)
        root = torch.where(h > 0.01, h.clamp(min=self.lowest).sqrt(), torch.zeros_like(h))  # <- here
        return self.head(root)
