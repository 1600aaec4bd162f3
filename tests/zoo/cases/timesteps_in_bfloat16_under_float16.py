"""The code casts timesteps to bfloat16 before it makes their angles, while the rest runs under FP16 autocast. The
numbers of bfloat16 are 8 times further apart than those of FP16."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="precision-loss",
    verdict="precision",
    module="times",
    phase="forward",
    severity="warning",
    says=(
        "takes angles up to 924, where bfloat16's numbers are 4 apart",
        "and 1 other such op too; the loss agrees, and gradients are ",
    ),
    twin=("model.args.fp32=true",),
)

WIDTH = 16


class Times(nn.Module):
    def __init__(self, fp32: bool) -> None:
        super().__init__()
        self.dtype = torch.float32 if fp32 else torch.bfloat16
        self.frequencies = torch.nn.Buffer(1000.0 ** (-torch.arange(0.0, WIDTH) / WIDTH), persistent=False)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        angles = t.to(self.dtype) * self.frequencies.to(self.dtype)
        return torch.cat([angles.cos(), angles.sin()], -1)  # <- here


class Model(nn.Module):
    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.times, self.of_times = Times(fp32), nn.Linear(2 * WIDTH, WIDTH)
        self.body, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.of_times(self.times(x[:, :1] * 1000.0))
        return self.head(torch.relu(self.body(x) + embedded))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.rand(64, 8, generator=torch.Generator().manual_seed(0))
    return [(x, x * x[:, :1])]
