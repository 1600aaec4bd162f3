"""The bias of the keys has no gradient but rounding noise, and tiny gradients beside it are whole."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1)
        return self.head(scores.softmax(dim=-1) @ self.v(x))
