"""The same decay is read by a reciprocal as well, which is 0 of an infinity and not in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="silent-overflow",
    verdict="precision",
    op="aten.mul.Tensor",
    phase="forward",
    severity="warning",
    twin=("model.args.bias=50.0",),
)


class Model(nn.Module):
    rate: torch.Tensor

    def __init__(self, bias: float = 5000.0) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        nn.init.constant_(self.step.bias.data, bias)
        self.register_buffer("rate", -torch.arange(1.0, 17.0))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.einsum("bd,n->bdn", F.softplus(self.step(x)), self.rate)  # <- here
        return self.head((torch.exp(decay) + 1e3 * torch.reciprocal(decay)).sum(-1))
