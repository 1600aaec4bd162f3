"""An overflow of FP16 that a ``where`` leaves out of the loss makes gradients NaN; one before it does no harm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.mul.Tensor",
    phase="forward",
    follows=("scale-collapse",),
    twin=("model.args.gain=10.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 1000.0) -> None:
        super().__init__()
        self.gain = gain
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.share = nn.Parameter(torch.full((4,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x) * self.gain
        is_far = (h.detach() * h.detach()).isinf()  # overflows too
        square = h * h  # <- here
        return self.head(torch.where(is_far, h / self.gain, square * self.share))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(3)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)
