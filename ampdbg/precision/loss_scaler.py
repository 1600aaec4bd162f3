"""The loss scaler of a config: dynamic, with bounds where they are asked for, or static."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ampdbg.config.schema import LossScale


class LossScaler(torch.amp.GradScaler):
    """A GradScaler whose scale stays between two bounds, or never moves where a number is given.

    With ``takes_half_gradients`` it is Apex's ``LossScaler`` (``apex/amp/scaler.py``): gradients of half weights are
    unscaled where GradScaler refuses them, and a static scale never skips a step.
    """

    def __init__(self, device: str, scale: LossScale | float, *, takes_half_gradients: bool = False) -> None:
        dynamic = scale if isinstance(scale, LossScale) else LossScale(init=scale)
        super().__init__(
            device,
            init_scale=min(dynamic.init, dynamic.max or dynamic.init),
            growth_factor=dynamic.growth_factor,
            backoff_factor=dynamic.backoff_factor,
            growth_interval=dynamic.growth_interval,
        )
        self._bounds = (dynamic.min, dynamic.max) if dynamic is scale else (dynamic.init, dynamic.init)
        self._takes_half_gradients = takes_half_gradients
        self.never_skips = takes_half_gradients and dynamic is not scale

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As in the parent class, within the bounds; ``new_scale`` may leave them."""
        super().update(new_scale)
        if new_scale is None and self._scale is not None and self._bounds != (None, None):
            self._scale.clamp_(*self._bounds)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Goes on as a GradScaler of this ``state_dict()`` would, within the bounds; a static scale does not."""
        least, most = self._bounds
        if least is None or least != most:
            scale = max(least or 0.0, min(float(state["scale"]), most or math.inf))
            self.load_state_dict({**state, "scale": scale})

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._takes_half_gradients)

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        if self.never_skips:
            return optimizer.step(*args, **kwargs)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


def skips_overflows(scaler: torch.amp.GradScaler) -> bool:
    """Whether the scaler withholds a step whose gradients are not finite."""
    return scaler.is_enabled() and not (isinstance(scaler, LossScaler) and scaler.never_skips)
