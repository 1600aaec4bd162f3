"""Informer's sparse attention, which picks its queries at random, over 96 hours."""

import torch
import torch.nn.functional as F
from models.model import Informer
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Informer(7, 7, 7, 96, 48, 24, d_model=32, n_heads=4, e_layers=2, d_layers=1, d_ff=64, embed="timeF")


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    return [
        (torch.randn(4, 96, 7), torch.rand(4, 96, 4) - 0.5, torch.randn(4, 72, 7), torch.rand(4, 72, 4) - 0.5)
        for _ in range(4)
    ]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    past, past_marks, future, future_marks = batch
    known = torch.cat([future[:, :48], torch.zeros_like(future[:, 48:])], dim=1)
    return F.mse_loss(model(past, past_marks, known, future_marks), future[:, -24:])
