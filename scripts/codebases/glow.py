"""glow-pytorch, whose first forward sets its actnorm from the data."""

from math import log

import torch
from model import Glow
from torch import nn

BINS = 32.0
PIXELS = 32 * 32 * 3


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Glow(3, 4, 2, affine=True, conv_lu=True)


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(4, 3, 32, 32) - 0.5 for _ in range(4)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    log_p, logdet, _ = model(batch + torch.rand_like(batch) / BINS)
    return -(-log(BINS) * PIXELS + logdet.mean() + log_p).mean() / (log(2) * PIXELS)
