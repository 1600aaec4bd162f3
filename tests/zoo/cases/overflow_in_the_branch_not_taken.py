"""An overflow of FP16 that a ``where`` leaves out of the loss makes gradients NaN; one before it does no harm."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten.mul.Tensor",
    phase="forward",
    follows=("scale-collapse",),
    twin=("model.args.gain=10.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 1000.0) -> None:
        super().__init__()
        self.gain = gain
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.share = nn.Parameter(torch.full((4,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x) * self.gain
        is_far = (h.detach() * h.detach()).isinf()  # overflows too
        square = h * h  # <- here
        return self.head(torch.where(is_far, h / self.gain, square * self.share))
