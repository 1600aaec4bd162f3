"""VQ-VAE-2 with its codebook of moving averages, kept in buffers."""

import torch
from torch import nn
from vqvae import VQVAE


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return VQVAE(channel=32, n_res_block=1, n_res_channel=16, embed_dim=16, n_embed=64)


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(4, 3, 64, 64) * 2 - 1 for _ in range(4)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out, latent_loss = model(batch)
    return nn.functional.mse_loss(out, batch) + 0.25 * latent_loss.mean()
