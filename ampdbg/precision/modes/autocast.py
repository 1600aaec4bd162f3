"""Autocast with FP32 weights. float16 has a loss scaler; bfloat16 needs none, as its exponents are float32's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ampdbg.precision.modes import LossScaler, PrecisionMode

LEVEL = {"name": "O1", "words": "autocast"}


class Autocast(PrecisionMode):
    """Each op computes in the dtype that autocast's op lists select."""

    def forward(self) -> AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return super().forward()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a static or dynamic scaler for float16, and a disabled one for other dtypes."""
        if self.dtype is not torch.float16:
            return super().scaler()
        return LossScaler(self.device.type, self.precision.loss_scale)


MODE = Autocast
