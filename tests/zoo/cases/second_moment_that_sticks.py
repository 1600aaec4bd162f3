"""Gradients that are large at first; in bfloat16 their squares stay in Adam's second moment."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="stuck-moment",
    verdict="precision",
    phase="optimizer",
    severity="warning",
    steps=1000,
    says=("the second moments of weight are stuck: with beta2 = 0.9981 a step takes 0.2% off",),
    config={
        "precision": {"dtype": "bfloat16"},
        "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.0, "betas": [0.9, 0.9981]}},
    },
    twin=("optimizer.args.betas=[0.9, 0.95]",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.bfloat16()


def batches() -> list[torch.Tensor]:
    return [torch.tensor(1.0 if step < 5 else 0.01) for step in range(1000)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.float().sum()
