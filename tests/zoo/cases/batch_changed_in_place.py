"""A step takes the labels out of its batch and scales what it keeps: a replay needs the batch from before."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow", verdict="precision", module="", op="aten.mul.Tensor", step=0, twin=("model.args.gain=1.0",)
)


class Model(nn.Module):
    def __init__(self, gain: float = 3e4) -> None:
        super().__init__()
        self.gain = gain
        self.body = nn.Linear(4, 1)
        nn.init.constant_(self.body.bias, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.gain  # <- here


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"inputs": [torch.randn(8, 4, generator=generator)], "labels": torch.randn(8, 1, generator=generator)}
        for _ in range(6)
    ]


def step(model: Model, batch: dict[str, Any]) -> torch.Tensor:
    labels = batch.pop("labels")
    inputs = batch["inputs"].pop().div_(10)
    return F.mse_loss(model(inputs), labels)
