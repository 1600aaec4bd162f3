"""States that forget at once: a decay below -65,504 is minus infinity, and exp makes the zero of it that FP32 has."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.step = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.constant_(self.step.bias[:2].data, 5000.0)
        self.register_buffer("rate", -torch.arange(1.0, 17.0))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.einsum("bd,n->bdn", F.softplus(self.step(x)), self.rate)
        kept = torch.exp(decay).sum(-1)
        return self.head(torch.sigmoid(self.step(x) * 20.0) + self.body(x) * kept)
