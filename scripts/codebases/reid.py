"""reid-strong-baseline: its triplet loss writes into FP32 distances with addmm_ of features, which are half."""

import torch
import torch.nn.functional as F
from layers.triplet_loss import TripletLoss
from modeling.backbones.resnet import BasicBlock, ResNet
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Embedder(nn.Module):
    """Its backbone, pooled into features as its Baseline does, through a linear layer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ResNet(last_stride=1, block=BasicBlock, layers=[1, 1, 1, 1])
        self.neck = nn.Linear(512, 64)
        self.classifier = nn.Linear(64, 4)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.neck(F.adaptive_avg_pool2d(self.base(images), 1).flatten(1))
        return self.classifier(features), features


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Embedder()


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(8, 3, 64, 32), torch.arange(4).repeat_interleave(2)) for _ in range(4)]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    scores, features = model(batch[0])
    return F.cross_entropy(scores, batch[1]) + TripletLoss(0.3)(features, batch[1])[0]
