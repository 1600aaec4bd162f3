"""The phase of a wave is thousands of turns: rounding the weights to half alone decides what its gradient is.

At the first loss scale half's gradient overflows and FP32's, at a crest by chance, does not. No pin brings that one
back, and at a lower scale the step is as good as any.
"""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(follows=("scale-calibration",), steps=12)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.phase.weight.copy_(torch.tensor([[2003.37, 1917.61, -1501.43, -1377.29]]))
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (64.0 * self.phase(x).float()).sin() + self.offset


def batches() -> list[torch.Tensor]:
    """The phase of FP32 is a quarter turn less 0.02 behind whole ones, and so the wave's slope is 0.02."""
    x, weight = torch.ones(1, 4), Model().phase.weight.detach()
    phase = 64.0 * float(x @ weight.T)
    crest = (phase // (2 * torch.pi) + 0.25) * 2 * torch.pi
    x[0, 0] += (crest - 0.02 - phase) / 64.0 / float(weight[0, 0])
    return [x]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).mean()
    return loss
