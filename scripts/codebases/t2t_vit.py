"""T2T-ViT with its performer tokens, at ten times its learning rate and without warm-up; its issues 65 and 69."""

import torch
import torch.nn.functional as F
import torchvision_on_cpu  # noqa: F401
from models.t2t_vit import T2T_ViT
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return T2T_ViT(img_size=64, embed_dim=64, depth=2, num_heads=4, mlp_ratio=2.0, num_classes=10)


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))) for _ in range(4)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
