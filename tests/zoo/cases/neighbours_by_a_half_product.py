"""Distances as sums of squares less a product in half: far from the origin nothing is left of them, and whatever is
taken for a neighbour is none. No rounding of weights leads there, for no weight takes part in the choice."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case

CASE = Case(
    code="precision-loss",
    verdict="precision",
    phase="forward",
    op="aten.bmm.default",
    says=("takes other elements than in FP32",),
    twin=("model.args.wide=true",),
)


def distances(x: Tensor) -> Tensor:
    squares = (x * x).sum(-1)
    found = -2 * torch.matmul(x, x.transpose(1, 2))  # <- here
    found += squares.unsqueeze(1)
    found += squares.unsqueeze(2)
    return found


class Model(nn.Module):
    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.is_wide = wide
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        is_near = distances(x.double() if self.is_wide else x) < 4.0  # autocast leaves float64 alone
        nearest = is_near.long().cumsum(-1).argmax(-1)  # the last of them
        near = x.gather(1, nearest.unsqueeze(-1).expand_as(x))
        return self.head((near - x).square()).mean(1)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 32, 3, generator=generator) * 3 + 40.0, torch.zeros(4, 1)) for _ in range(3)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)
