"""Weights in bfloat16, and an AdamW whose steps are too small for all but the smallest of them."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="frozen-weights",
    verdict="precision",
    phase="optimizer",
    steps=12,
    says=("head.weight (0 of 16 values)", "100% in norms"),
    config={"precision": {"dtype": "bfloat16"}, "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 1e-4}}},
    twin=("model.args.dtype=float32",),
)


class Model(nn.Module):
    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 1)
        self.to(getattr(torch, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x.to(self.body.weight.dtype)).relu()))
