"""Masks beyond half: a buffer, a product, written into scores in FP32, and the lowest number of half twice."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case()


class Model(nn.Module):
    causal: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 1)
        self.register_buffer("causal", torch.full((8, 8), -1e9).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) + self.causal.to(q.dtype)
        padding = (1.0 - torch.ones_like(scores).float().tril()) * -1e9
        scores = scores + padding[:, None, 0].repeat(1, 8, 1).to(scores.dtype)
        above = torch.ones(8, 8, device=x.device).triu(1) > 0
        scores = scores + q.float().mean().expand(8, 8).masked_fill(above, -1e9).half()
        lowest = torch.finfo(torch.float16).min
        scores = torch.where(above, lowest, scores) + torch.full_like(above, lowest, dtype=torch.float16).triu(1)
        return self.head(scores.softmax(dim=-1) @ v.float())


def batches() -> list[Pair]:
    return pairs(3, (2, 8), 4)
