"""What of apex.fp16_utils training scripts use."""

import torch


def to_python_float(value: torch.Tensor) -> float:
    return float(value.item())
