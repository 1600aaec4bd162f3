"""FP32 throughout: no autocast, no loss scale."""

from __future__ import annotations

from .mode import Mode


class FP32(Mode):
    """The reference that every other mode is compared with."""


MODE = FP32
