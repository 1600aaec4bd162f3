"""A small vision transformer that reads scikit-learn's handwritten digits.

Two of its choices matter here. The patches go through a fixed random projection, as in MoCo v3 (Chen et al.,
2021), so that the first attention block is the first thing that learns. And each norm stands behind its
residual addition, as in the first transformers, so that this block sees the patches as they are: made of
grey levels from 0 to 255.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

PATCH = 2
PATCHES = (8 // PATCH) ** 2


class Attention(nn.Module):
    """Multi-head self-attention. With ``qk_norm`` queries and keys are normalised, which bounds the logits."""

    def __init__(self, dim: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(dim // heads, elementwise_affine=False) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // heads, elementwise_affine=False) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        logits = (q * self.scale) @ k.transpose(-2, -1)
        mixed = logits.softmax(dim=-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual connection and a norm behind it."""

    def __init__(self, dim: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.attn = Attention(dim, heads, qk_norm)
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class DigitViT(nn.Module):
    """Images of shape (batch, 8, 8) to logits of shape (batch, 10), read from a class token."""

    patch_embed: torch.Tensor
    tokens: torch.Tensor

    def __init__(self, dim: int = 64, depth: int = 2, heads: int = 8, qk_norm: bool = False) -> None:
        super().__init__()
        self.register_buffer("patch_embed", nn.init.xavier_normal_(torch.empty(PATCH**2, dim)))
        self.register_buffer("tokens", torch.randn(1 + PATCHES, dim))
        self.block1 = nn.Sequential(*(Block(dim, heads, qk_norm) for _ in range(depth)))
        self.head = nn.Linear(dim, 10)
        self.apply(init_as_vit)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(images.unsqueeze(1), kernel_size=PATCH, stride=PATCH).transpose(1, 2)
        x = F.pad(patches @ self.patch_embed, (0, 0, 1, 0)) + self.tokens
        return self.head(self.block1(x)[:, 0])


def init_as_vit(module: nn.Module) -> None:
    """ViT's initialisation: weights from a truncated normal distribution of 0.02, biases 0."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def build_batches(batch_size: int = 32, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of the 1,797 images, with the grey levels of a PNG file, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images * (255 / 16), dtype=torch.float32)
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: len(order) // batch_size * batch_size].split(batch_size):
            yield images[chosen], labels[chosen]
