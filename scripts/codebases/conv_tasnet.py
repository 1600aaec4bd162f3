"""Conv-TasNet with its SI-SNR over permutations of the speakers."""

import torch
from conv_tasnet import ConvTasNet
from pit_criterion import cal_loss
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return ConvTasNet(N=32, L=20, B=16, H=32, P=3, X=3, R=1, C=2)


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    time = torch.arange(4000) / 8000
    tones = [torch.stack([torch.sin(2 * torch.pi * f * time) for f in pair]) * 0.3 for pair in ((220, 510), (330, 90))]
    sources = torch.stack(tones) + 0.01 * torch.randn(2, 2, 4000)
    return [(sources.sum(1), sources)]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    mixture, sources = batch
    return cal_loss(sources, model(mixture), torch.tensor([4000, 4000]))[0]
