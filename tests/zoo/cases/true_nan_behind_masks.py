"""The logarithm of a mask in each of thirty layers, infinite by intent, and behind all of them a NaN in FP32 too."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="true-nan",
    verdict="other",
    module="layers.28",
    op="aten.sqrt.default",
    step=0,
    twin=("model.args.offset=0.0",),
)


class Layer(nn.Module):
    def __init__(self, offset: float) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)
        self.offset = offset

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        value = self.value(x)
        read = (value @ value.transpose(1, 2) + mask.log()).softmax(dim=-1) @ value.float()
        size = (read.square().sum(dim=-1, keepdim=True) + 1.0 - self.offset).sqrt()  # <- here
        return x + 0.01 * read / size


class Model(nn.Module):
    def __init__(self, offset: float = 1e3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(offset if index == 28 else 0.0) for index in range(30))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def batches() -> list[Pair]:
    return pairs(3, (2, 6), 8)
