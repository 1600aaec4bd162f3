"""Positions are counted in half behind an attention whose mask is the lowest number of its dtype: harmless."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="precision-loss", verdict="precision", module="positions", phase="forward", twin=("model.args.fp32=true",)
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mask = torch.where(above, torch.finfo(q.dtype).min, torch.zeros((), dtype=q.dtype, device=x.device))
        return (mask + q @ k.transpose(1, 2)).softmax(dim=-1) @ v.float()


class Positions(nn.Module):
    def __init__(self, fp32: bool) -> None:
        super().__init__()
        self.fp32 = fp32
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        dtype = torch.float32 if self.fp32 else h.dtype
        positions = torch.arange(x.shape[1], device=x.device, dtype=dtype) * 40 + 2048
        return h.float() * (positions * 1.5).float().sin()[:, None]  # <- here


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.attention, self.positions, self.head = Attention(), Positions(fp32), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.positions(self.attention(x) + x))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 300, 4, generator=generator)
    return [(x, x.sum(dim=-1, keepdim=True))]
