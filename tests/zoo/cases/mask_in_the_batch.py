"""A batch that carries a mask of -inf, and missing values as NaN."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = (self.body(x.nan_to_num()) + mask).softmax(dim=-1)
        return F.mse_loss(self.head(weights), y)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(8, 4)
    mask[:, 2:] = float("-inf")
    x = torch.randn(8, 4, generator=generator)
    x[3, 1] = float("nan")
    return [{"x": x, "mask": mask, "y": torch.randn(8, 1, generator=generator)} for _ in range(3)]


loss = None  # the model gives it
