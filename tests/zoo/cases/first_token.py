"""The token that begins every sample has one huge negative activation, as in large language models: no mask."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="head",
    op="aten._to_copy.default",
    step=0,
    twin=("model.args.outlier=-1000.0",),
)


class Model(nn.Module):
    def __init__(self, outlier: float = -1e5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)
        with torch.no_grad():
            self.embedding.weight[0, 3] = outlier
            self.head.weight[:, 3] *= 1e-5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens)).transpose(1, 2)  # <- here


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(3):
        tokens = torch.randint(1, 20, (4, 6), generator=generator)
        tokens[:, 0] = 0
        made.append((tokens, torch.randint(0, 20, (4, 6), generator=generator)))
    return made


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), target)
