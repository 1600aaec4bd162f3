"""A softmax over rows of -inf whose NaN is taken out behind it: the loss is finite, and no gradient is."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="true-nan",
    verdict="other",
    module="attention",
    op="aten._softmax.default",
    phase="forward",
    says=("first in softmax in attention, which the loss leaves out and the gradients do not",),
    follows=("scale-collapse",),
    twin=("model.args.masked=2",),
)


class Attention(nn.Module):
    def __init__(self, masked: int) -> None:
        super().__init__()
        self.masked = masked
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        causal = torch.ones(8, 8, device=x.device).tril().log()
        early = (q @ k.transpose(-2, -1) + causal).softmax(dim=-1)
        padding = torch.zeros(8, 8, device=x.device)
        padding[3, : self.masked] = float("-inf")
        late = (q @ k.transpose(-2, -1) + padding).softmax(dim=-1)  # <- here
        return (early + late.nan_to_num(0.0)) @ v.float()


class Model(nn.Module):
    def __init__(self, masked: int = 8) -> None:
        super().__init__()
        self.attention = Attention(masked)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x))


def batches() -> list[Pair]:
    return pairs(3, (2, 8), 4)
