"""RESA's message passing from random weights, whose features do not grow as those of its issue 48 do."""

from argparse import Namespace

import torch
import torchvision_on_cpu  # noqa: F401
from models.resa import RESA
from torch import nn


class Lanes(nn.Module):
    """RESA between two convolutions, at the settings of its configs/culane.py but fewer channels."""

    def __init__(self) -> None:
        super().__init__()
        resa = Namespace(iter=4, input_channel=32, alpha=2.0, conv_stride=9)
        config = Namespace(resa=resa, backbone=Namespace(fea_stride=8), img_height=288, img_width=400)
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 9, 8, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.resa = RESA(config)
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.resa(self.stem(images)))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Lanes()


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(1, 3, 288, 400), torch.randint(0, 5, (1, 36, 50))) for _ in range(3)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
