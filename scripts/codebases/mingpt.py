"""minGPT, whose forward returns logits and loss."""

import torch
from mingpt.model import GPT
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT.get_default_config()
    config.model_type, config.n_layer, config.n_head, config.n_embd = None, 3, 4, 64
    config.vocab_size, config.block_size = 128, 64
    return GPT(config)


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 128, (4, 65)) for _ in range(6)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch[:, :-1], batch[:, 1:].contiguous())[1]
