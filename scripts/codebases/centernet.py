"""CenterNet's ResNet-18 with its heat map loss, trained until it is sure of its peaks."""

import torch
from models.losses import FocalLoss
from models.networks.msra_resnet import BasicBlock, PoseResNet
from models.utils import _sigmoid
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    model = PoseResNet(BasicBlock, [1, 1, 1, 1], {"hm": 1}, 64)
    nn.init.constant_(model.hm[-1].bias, -2.19)
    return model


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    heat = torch.zeros(2, 1, 16, 16)
    heat[0, 0, 4, 4] = heat[1, 0, 10, 8] = 1
    return [(torch.randn(2, 3, 64, 64), heat)]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return FocalLoss()(_sigmoid(model(batch[0])[-1]["hm"]), batch[1])
