"""A CTC loss that is infinite by design: the target does not fit into the input."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="infinite-loss", verdict="other", step=0, says=("1 of 2 samples",), twin=("loss.args.zero_infinity=true",)
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).log_softmax(dim=-1)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([[1, 2, 3], [1, 1, 1]])  # Three equal letters need two blanks between them: five frames.
    return [(torch.randn(4, 2, 4, generator=generator), targets) for _ in range(3)]


def loss(output: torch.Tensor, target: torch.Tensor, zero_infinity: bool = False) -> torch.Tensor:
    frames, letters = torch.full((2,), 4, device=output.device), torch.full((2,), 3, device=output.device)
    return F.ctc_loss(output, target, frames, letters, zero_infinity=zero_infinity)  # <- here
