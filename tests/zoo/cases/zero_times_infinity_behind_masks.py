"""The logarithm of a mask in each layer, infinite by intent, and behind them zero times the logarithm of zero."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="true-nan",
    verdict="other",
    module="layers.28",
    op="aten.log.default",
    step=0,
    twin=("model.args.floor=1.0e-4",),
)


class Layer(nn.Module):
    def __init__(self, floor: float) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)
        self.floor = floor

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        value = self.value(x)
        read = (value @ value.transpose(1, 2) + mask.log()).softmax(dim=-1) @ value.float()
        share = read.relu()
        entropy = share * share.clamp(min=self.floor).log()  # <- here
        return x + 0.01 * entropy


class Model(nn.Module):
    def __init__(self, floor: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(floor if index == 28 else 1e-4) for index in range(30))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def batches() -> list[Pair]:
    return pairs(3, (2, 6), 8)
