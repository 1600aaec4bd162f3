"""vector-quantize-pytorch in a small autoencoder."""

import torch
from torch import nn
from vector_quantize_pytorch import VectorQuantize


class Autoencoder(nn.Module):
    """Images through a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1))
        self.quantize = VectorQuantize(dim=32, codebook_size=64, accept_image_fmap=True)
        self.decoder = nn.Sequential(
            nn.Upsample(scale_factor=4), nn.Conv2d(32, 16, 3, 1, 1), nn.GELU(), nn.Conv2d(16, 1, 1)
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, _, loss = self.quantize(self.encoder(images))
        return self.decoder(codes).clamp(-1, 1), loss


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Autoencoder()


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 1, 28, 28) for _ in range(6)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out, loss = model(batch)
    return (out - batch).abs().mean() + 10 * loss.mean()
