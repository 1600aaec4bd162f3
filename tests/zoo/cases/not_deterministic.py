"""A step that fails by a random number which no replay can bring back."""

import itertools

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="unknown", verdict="inconclusive", step=2, says=("none of 3 replays",), twin=("model.args.fails_at=99",)
)


class Model(nn.Module):
    def __init__(self, fails_at: int = 2) -> None:
        super().__init__()
        self.fails_at = fails_at
        calls = itertools.count()
        self.draw = lambda: next(calls)  # out of reach, as a generator of another library is
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1e6 if self.draw() == self.fails_at else 1.0
        return self.head(x) * factor
