"""Precision levels, in Apex's words: what each is called, the mode that trains at it, and the format it lowers to.

A new level is a line here and a file of :mod:`ampdbg.precision.modes` (no torch here).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampdbg.formats import FLOAT16, FLOAT32, FORMATS, FloatFormat


@dataclass(frozen=True)
class Level:
    """A value of ``precision.level``: ``mode`` names its module in ``ampdbg.precision.modes``."""

    words: str
    mode: str
    lowers: bool = True


LEVELS: Mapping[str, Level] = {
    "O0": Level("FP32", "fp32", lowers=False),
    "O1": Level("autocast", "autocast"),
}

CHOICES = ", ".join(f"{name} ({level.words})" for name, level in LEVELS.items())
"""How a message lists them."""


def lowest_format(level: str, dtype: str) -> FloatFormat:
    """The narrowest format that a level computes in when ``precision.dtype`` is ``dtype``."""
    return FORMATS[dtype] if LEVELS[level].lowers else FLOAT32


def format_of_config(config: Mapping[str, Any]) -> FloatFormat:
    """The narrowest format of a run, by the config that its record keeps; FP16 where that does not say."""
    precision = config.get("precision")
    if not isinstance(precision, Mapping):
        return FLOAT16
    level, dtype = str(precision.get("level", "O1")), str(precision.get("dtype", "float16"))
    return lowest_format(level if level in LEVELS else "O1", dtype if dtype in FORMATS else "float16")
