"""A mask assigned by index: -1e9 is minus infinity before any op sees it, and a row masked throughout turns NaN."""

import torch
from torch import nn

from tests.zoo.case import Case


def says() -> str:
    """Torch 2.6 and 2.15 refuse to round such a number as it is assigned, and versions between make it infinite."""
    try:
        torch.zeros(1, dtype=torch.float16)[torch.tensor([True])] = -1e9
    except RuntimeError as error:
        return str(error)
    return "the code writes a constant of magnitude 1e9"


CASE = Case(code="mask-constant", verdict="other", step=0, says=(says(),), twin=("model.args.fill=-10000.0",))


class Model(nn.Module):
    def __init__(self, fill: float = -1e9) -> None:
        super().__init__()
        self.fill = fill
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.body(x)
        scores[:, 3:] = float("-inf")  # in FP32 too: this is meant
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        hidden[3] = True
        scores[hidden] = self.fill  # <- here
        return self.head(scores.softmax(dim=-1))
