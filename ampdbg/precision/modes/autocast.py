"""Autocast with FP32 weights; float16 has a loss scaler, bfloat16 has the exponents of float32 and needs none."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ampdbg.precision.modes import LossScaler, PrecisionMode

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
        return LossScaler(self.device.type, self.precision.loss_scale)


MODE = Autocast
