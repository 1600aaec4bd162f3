"""MONAI's UNet with its DiceCELoss, which the user's own step calls."""

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(1, 1, 32, 32, 32), (torch.rand(1, 1, 32, 32, 32) > 0.9).float()) for _ in range(3)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return DiceCELoss(to_onehot_y=True, softmax=True)(model(batch[0]), batch[1])
