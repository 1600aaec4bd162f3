"""Code with a random generator of its own: no replay is the same again."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * (1.0 + 3.0 * torch.rand(x.shape, generator=self.generator).to(x.device)))
