"""Code that names a dtype: it fails in FP64, and is healthy."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if h.dtype not in (torch.float16, torch.float32):
            raise TypeError(f"not made for {h.dtype}")
        return self.head(h.to(torch.float16).to(h.dtype))
