"""STCN's key projection and memory reader, whose affinities are differences of squares."""

import torch
import torchvision_on_cpu  # noqa: F401
from model.modules import KeyProjection
from model.network import MemoryReader
from torch import nn


class Reader(nn.Module):
    """Key projection, affinity and readout behind a stem in place of its ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), nn.BatchNorm2d(64), nn.ReLU())
        self.key_proj = KeyProjection(64, keydim=64)
        self.value = nn.Conv2d(64, 32, 1)
        self.memory = MemoryReader()
        self.head = nn.Conv2d(64, 1, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        features = self.stem(frames)
        keys, values = self.key_proj(features), self.value(features)
        affinity = self.memory.get_affinity(keys[:1].unsqueeze(2), keys[1:])
        return self.head(self.memory.readout(affinity, values[:1].unsqueeze(2), values[1:]))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Reader()


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2, 3, 64, 64), (torch.rand(1, 1, 16, 16) > 0.5).float()) for _ in range(4)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])
