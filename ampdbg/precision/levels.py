"""Precision levels, in Apex's words: the autocast region of a step, and the scaler that goes with it.

O0 is FP32 throughout; O1 is autocast with FP32 weights.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from ampdbg.config import Precision

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def low_dtype(precision: Precision) -> torch.dtype:
    """The dtype that autocast lowers to; float32 when nothing is lowered."""
    return torch.float32 if precision.level == "O0" else DTYPES[precision.dtype]


def autocast_region(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """A fresh autocast region for one forward pass; none at all in FP32."""
    dtype = low_dtype(precision)
    if dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


class StaticLossScaler(torch.amp.GradScaler):
    """A scaler whose scale never moves, as Apex's ``loss_scale=128.0``; overflowing steps are still skipped."""

    def __init__(self, device: str, scale: float) -> None:
        super().__init__(device, init_scale=scale)
        self._static_scale = scale

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Keeps the scale; ``new_scale`` still sets another one, as in the parent class."""
        super().update(self._static_scale if new_scale is None else new_scale)


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """The scaler of a run. Only float16 has one that is enabled: bfloat16 has the exponents of float32."""
    if low_dtype(precision) is not torch.float16:
        return torch.amp.GradScaler(device.type, enabled=False)
    scale = precision.loss_scale
    if isinstance(scale, (int, float)):
        return StaticLossScaler(device.type, float(scale))
    return torch.amp.GradScaler(
        device.type,
        init_scale=scale.init,
        growth_factor=scale.growth_factor,
        backoff_factor=scale.backoff_factor,
        growth_interval=scale.growth_interval,
    )
