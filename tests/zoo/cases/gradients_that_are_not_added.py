"""A gradient of 256 and many of 1: 256 and 1 are 256 in bfloat16, in which these weights add them up."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="lost-accumulation",
    steps=2,
    verdict="precision",
    phase="optimizer",
    severity="warning",
    says=("the sum of 64 gradients in half is 20% from float32's",),
    config={
        "precision": {"dtype": "bfloat16"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "train": {"steps": 2, "accumulate": 64},
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
    return [torch.full((64,), 256.0), *[torch.ones(64)] * 63]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.float().sum()
