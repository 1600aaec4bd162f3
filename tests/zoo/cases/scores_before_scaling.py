"""The product of queries and keys overflows before it is scaled."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="attn",
    op="aten.bmm.default",
    step=0,
    twin=("model.args.scale_first=true",),
)


class Attention(nn.Module):
    def __init__(self, scale_first: bool) -> None:
        super().__init__()
        self.scale_first = scale_first
        self.qkv = nn.Linear(4, 192)
        nn.init.normal_(self.qkv.weight[:128], std=20.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.scale_first:
            scores = (q / 64) @ (k / 64).transpose(-2, -1)
        else:
            scores = q @ k.transpose(-2, -1)  # <- here
            scores = scores / 4096
        return scores.softmax(dim=-1) @ v


class Model(nn.Module):
    def __init__(self, scale_first: bool = False) -> None:
        super().__init__()
        self.attn = Attention(scale_first)
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attn(10.0 * x))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2, 16, 4, generator=generator), torch.randn(2, 16, 1, generator=generator))]
