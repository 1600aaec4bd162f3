"""vit-pytorch's DeepViT."""

import torch
import torch.nn.functional as F
import torchvision_on_cpu  # noqa: F401
from torch import nn
from vit_pytorch.deepvit import DeepViT


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return DeepViT(image_size=32, patch_size=8, num_classes=10, dim=64, depth=3, heads=4, mlp_dim=128)


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))) for _ in range(6)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
