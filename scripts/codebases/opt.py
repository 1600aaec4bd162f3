"""OPT of transformers, its eager attention with padded rows."""

import torch
import torchvision_on_cpu  # noqa: F401
from torch import nn
from transformers import OPTConfig, OPTForCausalLM


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=200, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    )
    config._attn_implementation = "eager"
    return OPTForCausalLM(config)


def build_data() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    mask = torch.ones(4, 24, dtype=torch.long)
    mask[:2, :8] = 0
    batches = []
    for _ in range(4):
        tokens = torch.randint(3, 200, (4, 24))
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    return batches
