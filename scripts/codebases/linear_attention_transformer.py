"""lucidrains' linear attention transformer as a causal language model."""

import torch
import torch.nn.functional as F
from linear_attention_transformer import LinearAttentionTransformerLM
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return LinearAttentionTransformerLM(num_tokens=256, dim=64, heads=4, depth=2, max_seq_len=512, causal=True)


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 256, (2, 513)) for _ in range(6)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
