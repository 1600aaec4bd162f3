"""Positions above 2048 are counted in half, and neighbours get the same angle."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(code="precision-loss", verdict="precision", module="", phase="forward", twin=("model.args.fp32=true",))


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.fp32 = fp32
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        dtype = torch.float32 if self.fp32 else h.dtype
        positions = torch.arange(x.shape[1], device=x.device, dtype=dtype) + 2048
        wave = (positions * 1.5).float().sin()[:, None]  # <- here
        return self.head(h.float() * wave)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3000, 4, generator=generator)
    return [(x, x.sum(dim=-1, keepdim=True))]
