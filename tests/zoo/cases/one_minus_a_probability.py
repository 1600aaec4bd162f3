"""A probability near 1 is 1 in half, and the logarithm of what is left of it that of 0; bfloat16 is coarser still."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="eps-underflow",
    verdict="precision",
    module="",
    op="aten.log.default",
    step=0,
    phase="forward",
    says=("takes the logarithm",),
    twin=("model.args.fp32=true",),
)


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.fp32 = fp32
        self.head = nn.Linear(4, 1)
        nn.init.constant_(self.head.bias, 10.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        likely = torch.sigmoid(logits.float() if self.fp32 else logits)
        return -torch.log(1 - likely)  # <- here


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(output.float(), target)
