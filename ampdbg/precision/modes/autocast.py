"""Autocast with FP32 weights; float16 has a loss scaler, bfloat16 has the exponents of float32 and needs none."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ampdbg.precision.modes import PrecisionMode

LEVEL = {"name": "O1", "words": "autocast"}


class Autocast(PrecisionMode):
    """Each op computes in the dtype that autocast's lists give it."""

    def forward(self) -> AbstractContextManager[Any]:
        """A region of autocast; none for float32, which lowers nothing."""
        if self.dtype is torch.float32:
            return super().forward()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """A static or a dynamic scaler for float16."""
        if self.dtype is not torch.float16:
            return super().scaler()
        scale = self.precision.loss_scale
        if isinstance(scale, (int, float)):
            return StaticLossScaler(self.device.type, float(scale))
        return torch.amp.GradScaler(
            self.device.type,
            init_scale=scale.init,
            growth_factor=scale.growth_factor,
            backoff_factor=scale.backoff_factor,
            growth_interval=scale.growth_interval,
        )


class StaticLossScaler(torch.amp.GradScaler):
    """A scaler whose scale never moves, as Apex's ``loss_scale=128.0``; overflowing steps are still skipped."""

    def __init__(self, device: str, scale: float) -> None:
        super().__init__(device, init_scale=scale)
        self._static_scale = scale

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Keeps the scale; ``new_scale`` still sets another one, as in the parent class."""
        super().update(self._static_scale if new_scale is None else new_scale)


MODE = Autocast
