"""Autocast lowers the product of positions and frequencies, so rotary embeddings turn by rounded angles: the loss of
one step hardly shows it."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="precision-loss",
    verdict="precision",
    module="block",
    phase="forward",
    severity="warning",
    says=(
        "takes angles up to 600, where bfloat16's numbers are 4 apart",
        "the loss agrees, and gradients are ",
    ),
    config={"precision": {"dtype": "bfloat16"}},
    twin=("model.args.fp32=true",),
)

POSITIONS, WIDTH = 600, 16


class Block(nn.Module):
    def __init__(self, fp32: bool) -> None:
        super().__init__()
        self.fp32, self.qkv, self.out = fp32, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0.0, WIDTH, 2) / WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False) if self.fp32 else contextlib.nullcontext():
            angles = torch.einsum("i,j->ij", positions, self.frequencies)
        turn = torch.cat([angles, angles], -1)
        turns = turn.cos(), turn.sin()  # <- here
        query, key, value = self.qkv(x).chunk(3, -1)
        made = F.scaled_dot_product_attention(rotated(query, *turns), rotated(key, *turns), value, is_causal=True)
        return self.out(made)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-other, one], -1) * sin.to(x.dtype)


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.body, self.block, self.head = nn.Linear(4, WIDTH), Block(fp32), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        return self.head(h + self.block(h))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(2, POSITIONS, 4, generator=torch.Generator().manual_seed(0))
    return [(x, x.sum(dim=-1, keepdim=True))]
