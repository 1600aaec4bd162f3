"""The divisor of a linear attention overflows, so one over it is zero. A layer norm of the zero row makes gradients
300 times too large, which are NaN at every loss scale, although no inf of the forward pass reaches them."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case, Pair

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="attention",
    op="aten.bmm.default",
    step=0,
    twin=("model.args.length=64",),
)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1, self.v(x) / length
        kv = torch.einsum("nsd,nsv->ndv", k, v)
        z = 1 / (torch.einsum("nld,nd->nl", q, k.sum(dim=1)) + 1e-6)  # <- here
        return x + self.norm(torch.einsum("nld,ndv,nl->nlv", q, kv, z) * length)


class Model(nn.Module):
    def __init__(self, length: int = 1024) -> None:
        super().__init__()
        self.length = length
        self.attention, self.head = Attention(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x[:, : self.length]))


def batches() -> list[Pair]:
    generator = torch.Generator().manual_seed(1)
    return [
        (4 * torch.randn(1, 1024, 32, generator=generator), torch.randint(4, (1, 1024), generator=generator))
        for _ in range(3)
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 30 * F.cross_entropy(output.flatten(0, 1), target[:, : output.shape[1]].flatten())
