"""An eps of 1e-8 is zero in half, and a row of zeros is divided by it."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="eps-underflow", verdict="precision", module="", op="aten.div.Tensor", step=0, twin=("model.args.eps=1.0e-5",)
)


class Model(nn.Module):
    def __init__(self, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = eps
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        h = h / (h.abs().amax(dim=-1, keepdim=True) + self.eps)  # <- here
        return self.head(h)


def batches() -> list[Pair]:
    made = pairs()
    for inputs, _ in made:
        inputs[5] = 0.0
    return made
