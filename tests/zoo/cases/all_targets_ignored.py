"""A batch in which every target is ignored: the loss, torch's own function, is a mean over nothing."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="true-nan",
    verdict="other",
    phase="forward",
    op="aten.nll_loss_forward.default",
    step=1,
    twin=("data.args={ignored: 7}",),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def batches(ignored: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(3)]
    pairs[1][1][:ignored] = -100
    return pairs


# Called by nobody but ampdbg: no line of source is to be blamed.
loss = F.cross_entropy
