"""FP32 throughout: no autocast, no loss scale."""

from __future__ import annotations

from ampdbg.precision.modes import PrecisionMode

LEVEL = {"name": "O0", "words": "FP32", "lowers": False}


class FP32(PrecisionMode):
    """The reference for all other modes."""


MODE = FP32
