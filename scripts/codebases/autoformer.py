"""Autoformer over 96 hours, whose Fourier transform of half values cuFFT refuses: 96 is no power of two."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from models.Autoformer import Model
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"seq_len": 96, "label_len": 48, "pred_len": 24, "enc_in": 7, "dec_in": 7, "c_out": 7}
    layers = {"d_model": 32, "d_ff": 64, "n_heads": 4, "e_layers": 1, "d_layers": 1, "moving_avg": 25, "factor": 1}
    rest = {"embed": "timeF", "freq": "h", "dropout": 0.05, "activation": "gelu", "output_attention": False}
    return Model(SimpleNamespace(**sizes, **layers, **rest))


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
