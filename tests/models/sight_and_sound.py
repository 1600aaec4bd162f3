"""Vision and speech models of transformers and timm, built from a config, and batches to fine-tune them."""

from typing import Any

import tests.models.torchvision_on_cpu  # noqa: F401 - transformers imports torchvision where it is there

# isort: split
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, WhisperConfig, WhisperForConditionalGeneration

from tests.models.language import IGNORED, SHAPE, Growth, factory, grown

CLASSES = 10
PIXELS = 32
MELS = 16
FRAMES = 32


IMAGES = {"image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES}
vit = factory(ViTConfig, ViTForImageClassification, **SHAPE, intermediate_size=128, **IMAGES)
"""ViT for classification."""


WIDTHS = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 512}
DEPTHS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
PLACES = {"num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
whisper = factory(WhisperConfig, WhisperForConditionalGeneration, **WIDTHS, **DEPTHS, **PLACES, **TOKENS)
"""Whisper: two convolutions, an encoder and a decoder."""


def timm_model(name: str, grow: Growth | None = None, **changes: Any) -> nn.Module:
    """A model of timm by its name, for images of 32 pixels."""
    import timm

    return grown(timm.create_model(name, num_classes=CLASSES, **changes), grow)


def pictures(count: int = 3, size: int = 4) -> list[dict[str, torch.Tensor]]:
    """Normalised pictures with a class each, in transformers' words."""
    return [{"pixel_values": pixels, "labels": label} for pixels, label in picture_pairs(count, size)]


def picture_pairs(count: int = 3, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Normalised pictures and their classes."""
    return [(torch.randn(size, 3, PIXELS, PIXELS), torch.randint(CLASSES, (size,))) for _ in range(count)]


def recordings(count: int = 3, size: int = 4, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Log-mel spectrograms in Whisper's range, -1 to 1.5, and the words spoken."""
    made = []
    for _ in range(count):
        labels = torch.randint(3, 512, (size, length))
        labels[1:, length // 2 :] = IGNORED
        made.append({"input_features": torch.rand(size, MELS, FRAMES) * 2.5 - 1.0, "labels": labels})
    return made
