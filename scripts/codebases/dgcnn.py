"""DGCNN on clouds in the unit sphere: neighbours by a difference of squares, which only ranks."""

from argparse import Namespace

import torch
import torch.nn.functional as F
from model import DGCNN_cls
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return DGCNN_cls(Namespace(k=8, emb_dims=64, dropout=0.5), output_channels=5)


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(F.normalize(torch.randn(4, 3, 64), dim=1), torch.randint(0, 5, (4,))) for _ in range(4)]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
