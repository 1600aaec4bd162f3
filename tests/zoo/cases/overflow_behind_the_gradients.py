"""A variance overflows and the loss stays finite; the gradients overflow at the first scales for another reason."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    phase="forward",
    op="aten.mul.Tensor",
    steps=14,
    says=("differ from FP32's",),
    config={"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}}},
    twin=("model.args.gain=1.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 500.0) -> None:
        super().__init__()
        self.gain = gain
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x) * self.gain
        h = h - h.mean(-1, keepdim=True)
        variance = (h * h).mean(-1, keepdim=True)  # <- here
        return self.head(h / (variance + 1.0).sqrt()) * 100.0


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(64, 8, generator=generator) * 2, torch.zeros(64, 1)) for _ in range(3)]


def step(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x).float() - y).sum()
