"""Gradients of one, of which bfloat16 weights add up 256: 256 and 1 are 256 in bfloat16."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="lost-accumulation",
    steps=2,
    verdict="precision",
    phase="optimizer",
    severity="warning",
    says=("the sum of 512 gradients in half is 50% from what it is in float32",),
    config={
        "precision": {"dtype": "bfloat16"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "train": {"steps": 2, "accumulate": 512},
    },
    twin=("model.args.dtype=float32",),
)


class Model(nn.Module):
    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, dtype=getattr(torch, dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.to(self.weight.dtype)


def batches() -> list[torch.Tensor]:
    return [torch.ones(64)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.float().sum()
