"""A masked character model with linear attention, on the text of Python's own language reference.

The attention is that of Katharopoulos et al., "Transformers are RNNs" (2020), without a causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

TEXT = "\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))
MASK = len(ALPHABET)
IGNORED = -100
"""The target at a character that was not hidden: cross_entropy's default ``ignore_index``."""


class LinearAttention(nn.Module):
    """Attention whose cost grows linearly with the length: phi(q) (phi(k)^T v) over phi(q) sum phi(k).

    With ``fp32_products`` the sums over the sequence are taken in FP32, outside of autocast.
    """

    def __init__(self, dim: int, heads: int, fp32_products: bool) -> None:
        super().__init__()
        self.heads = heads
        self.fp32_products = fp32_products
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)
        if self.fp32_products:
            with torch.autocast(x.device.type, enabled=False):
                mixed = self.attend(q.float(), k.float(), v.float())
        else:
            mixed = self.attend(q, k, v)
        return self.proj(mixed.flatten(-2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """All of shape (batch, length, heads, head dim), the result too."""
        q, k = F.elu(q) + 1, F.elu(k) + 1
        k_sum = k.sum(dim=1)
        kv = torch.einsum("nshd,nshm->nhdm", k, v)
        normaliser = torch.einsum("nlhd,nhd->nlh", q, k_sum)
        return torch.einsum("nlhd,nhdm->nlhm", q, kv) / normaliser.unsqueeze(-1)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and with a residual connection."""

    def __init__(self, dim: int, heads: int, fp32_products: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = LinearAttention(dim, heads, fp32_products)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharacterModel(nn.Module):
    """Character indices of shape (batch, length) to logits of shape (batch, length, alphabet)."""

    def __init__(
        self, length: int = 2048, dim: int = 128, heads: int = 2, depth: int = 2, fp32_products: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET) + 1, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, fp32_products) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, len(ALPHABET))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embed(characters) + self.position[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def build_batches(
    batch_size: int = 2, length: int = 2048, hidden: float = 0.15, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless pairs of text with some characters hidden, and those characters."""
    index = {character: i for i, character in enumerate(ALPHABET)}
    text = torch.tensor([index[character] for character in TEXT])
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (batch_size,), generator=generator)
        characters = torch.stack([text[start : start + length] for start in starts])
        masked = torch.rand(characters.shape, generator=generator) < hidden
        yield characters.masked_fill(masked, MASK), characters.masked_fill(~masked, IGNORED)


def hidden_characters_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the hidden characters."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
