"""A graph of nearest neighbours, as in DGCNN: near ties fall otherwise in FP16, and the loss agrees. The result is
another one, and none the worse: the product that decides it is named, as information."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case

CASE = Case(steps=10, follows=("precision-loss",))
NEAREST = 8


def neighbours(x: Tensor) -> Tensor:
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    squares = torch.sum(x**2, dim=1, keepdim=True)
    return (-squares - inner - squares.transpose(2, 1)).topk(NEAREST, dim=-1)[1]


class EdgeConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2 * inputs, outputs, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, points = x.shape
        index = neighbours(x).reshape(batch, 1, -1).expand(-1, channels, -1)
        near = x.gather(2, index).view(batch, channels, points, NEAREST)
        own = x.unsqueeze(-1).expand_as(near)
        edges = torch.cat([near - own, own], dim=1)
        return F.leaky_relu(self.norm(self.convolution(edges)), 0.2).amax(dim=-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(EdgeConvolution(3, 16), EdgeConvolution(16, 32), EdgeConvolution(32, 64))
        self.head = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.LeakyReLU(), nn.Linear(64, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).amax(dim=-1))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    clouds = [F.normalize(torch.randn(4, 3, 64, generator=generator), dim=1) for _ in range(4)]
    return [(cloud, torch.randint(0, 5, (4,), generator=generator)) for cloud in clouds]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
