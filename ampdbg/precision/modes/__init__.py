"""Precision modes, a file each: what a step lowers, casts and scales at each level of :mod:`ampdbg.levels`."""

from __future__ import annotations

import importlib

import torch

from ampdbg.config import Precision
from ampdbg.levels import LEVELS

from .mode import DTYPES, Mode

__all__ = ["DTYPES", "Mode", "mode_of"]


def mode_of(precision: Precision, device: torch.device) -> Mode:
    """The mode that the config's level asks for."""
    module = importlib.import_module(f"{__name__}.{LEVELS[precision.level].mode}")
    mode: Mode = module.MODE(precision, device)
    return mode
