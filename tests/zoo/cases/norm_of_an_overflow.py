"""The squares of a norm overflow, so it divides by inf. The next norm then divides zero by zero."""

import torch
from torch import nn

from tests.zoo.case import Case, Pair, pairs

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="first",
    op="aten.mul.Tensor",
    step=0,
    twin=("model.args.gain=1.0", "model.args.eps=1.0e-3"),
)


class Norm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = (centred * centred).mean(dim=-1, keepdim=True)  # <- here
        return centred / (variance.sqrt() + self.eps)


class Model(nn.Module):
    def __init__(self, gain: float = 3000.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.gain = gain
        self.first, self.second = Norm(eps), Norm(eps)
        self.body = nn.Linear(4, 16, bias=False)
        self.middle = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.body(x) * self.gain)
        return self.head(self.second(self.middle(h)))


def batches() -> list[Pair]:
    return pairs()
