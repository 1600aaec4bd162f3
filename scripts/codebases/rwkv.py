"""RWKV-v1 where a key of a trained model is 12: exp(12) is 162,755, and is cast to half for the sum over time."""

import torch
from src.model import GPT, GPTConfig
from torch import nn

LENGTH = 64


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(
        64,
        LENGTH,
        model_type="RWKV",
        n_layer=3,
        n_head=4,
        n_embd=64,
        n_attn=64,
        n_ffn=64,
        rwkv_emb_scale=0.4,
        rwkv_tiny_attn=0,
        rwkv_tiny_head=1,
    )
    model = GPT(config)
    with torch.no_grad():
        model.blocks[1].attn.key.bias[5] = 12.0
    return model


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 64, (4, LENGTH + 1)) for _ in range(6)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())[1]
