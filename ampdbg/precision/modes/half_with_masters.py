"""A half model with FP32 batch norms and FP32 master weights, like Apex's O2."""

from __future__ import annotations

from ampdbg.precision.modes.half import HalfModel

LEVEL = {
    "name": "O2",
    "words": "half model, FP32 batch norms and master weights",
    "loss_scale": {"max": 16777216.0},
    "has_half_weights": True,
}


class HalfModelWithMasters(HalfModel):
    """Half weights copied from float32 masters after each optimizer step."""

    keeps_norms = True
    has_masters = True


MODE = HalfModelWithMasters
