"""SupContrast's loss on features that were not normalised, as in its issue 50: exp of all other logits is 0, log(0)."""

import torch
from losses import SupConLoss
from networks.resnet_big import SupConResNet
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Unnormalised(nn.Module):
    """Its encoder and projection head, without the last line of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SupConResNet("resnet18", feat_dim=32)
        self.scale = 100.0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * self.net.head(self.net.encoder(images))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Unnormalised()


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(8, 2, 3, 16, 16), torch.randint(0, 3, (8,))) for _ in range(4)]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    features = model(images.flatten(0, 1)).unflatten(0, (-1, 2))
    return SupConLoss()(features, labels)
