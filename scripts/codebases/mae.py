"""MAE with normalised pixels as its target."""

from functools import partial
from typing import Any

import torchvision_on_cpu  # noqa: F401

# isort: split
import models_mae
import numpy as np
import torch
from timm.models.vision_transformer import Block
from torch import nn

np.float = float  # type: ignore[attr-defined]  # its position encoding is older than NumPy 1.24


def block(*given: Any, qk_scale: None = None, **named: Any) -> nn.Module:
    """A block of timm 0.3, whose qk_scale is None wherever MAE makes one."""
    return Block(*given, **named)


models_mae.Block = block


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return models_mae.MaskedAutoencoderViT(
        img_size=64,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        decoder_embed_dim=32,
        decoder_depth=1,
        decoder_num_heads=4,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        norm_pix_loss=True,
    )


def build_data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, 64, 64) for _ in range(6)]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch, mask_ratio=0.75)[0]
