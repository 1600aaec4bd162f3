"""RAFT, small, with the sequence loss of its train.py."""

from argparse import Namespace

import torch
from raft import RAFT
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return RAFT(Namespace(small=True, dropout=0, alternate_corr=False, mixed_precision=True))


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    shape = (1, 3, 128, 128)
    return [
        (torch.rand(shape) * 255, torch.rand(shape) * 255, torch.randn(1, 2, 128, 128) * 5, torch.ones(1, 128, 128))
        for _ in range(3)
    ]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    image1, image2, flow, valid = batch
    predictions = model(image1, image2, iters=4)
    inside = (valid >= 0.5) & (torch.sum(flow**2, dim=1).sqrt() < 400)
    losses = [(inside[:, None] * (prediction - flow).abs()).mean() for prediction in predictions]
    return torch.stack([0.8 ** (len(losses) - 1 - i) * loss for i, loss in enumerate(losses)]).sum()
