"""Performer with ReLU features over 2,048 tokens: its normaliser sums over all of them."""

import torch
import torch.nn.functional as F
from performer_pytorch import PerformerLM
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return PerformerLM(
        num_tokens=64, max_seq_len=2048, dim=64, depth=1, heads=2, dim_head=32, causal=False, generalized_attention=True
    )


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 64, (1, 2048)) for _ in range(3)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).transpose(1, 2), batch)
