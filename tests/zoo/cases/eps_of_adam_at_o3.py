"""The eps of Adam is 0 in the half weights of O3; O2's master weights are float32."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="optimizer-underflow",
    verdict="precision",
    phase="optimizer",
    step=0,
    says=("body.weight", "eps=1e-08 is 0 in half"),
    config={"precision": {"level": "O3"}, "optimizer": {"target": "torch.optim:Adam"}},
    twin=("precision.level=O2",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


loss = F.mse_loss
