"""Minus infinity as a mask, the logarithm of zero, finfo.min in half, and a buffer that is a mask."""

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
        self.register_buffer("causal", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)
        scores = scores + self.causal
        scores = scores.half().masked_fill(torch.ones_like(scores).triu(1) > 0, torch.finfo(torch.float16).min)
        scores = scores + torch.full_like(scores, torch.finfo(torch.float16).min).triu(2)
        places = torch.arange(8, device=x.device)
        distance = (places[None] - places[:, None]).clamp(min=0).float().log()
        bias = torch.where(torch.isinf(distance), torch.zeros_like(distance), distance)
        return self.head((scores + bias).softmax(dim=-1) @ v.float())


def batches() -> list[Pair]:
    return pairs(3, (2, 8), 4)
