"""A sum over a long sequence, taken by einsum, which autocast runs in half."""

import torch
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="pool",
    op="aten.bmm.default",
    step=0,
    twin=("model.args.mean=true",),
)


class Pool(nn.Module):
    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.full(x.shape[:2], 1.0 / x.shape[1] if self.mean else 1.0, device=x.device)
        return torch.einsum("ns,nsd->nd", weights, x)  # <- here


class Model(nn.Module):
    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.embed.bias.data = torch.linspace(20.0, 100.0, 4)
        self.pool = Pool(mean)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.pool(self.embed(x))))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2, 1024, 4, generator=generator), torch.randn(2, 1, generator=generator))]
