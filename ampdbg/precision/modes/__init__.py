"""Precision modes, a file each, and their loss scaler: what a step lowers, casts and scales at one level.

``MODE`` is the file's class. ``LEVEL`` is a literal, which :mod:`ampdbg.levels` reads: the fields of its ``Level``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.config.schema import LossScale, Precision
from ampdbg.errors import WorkloadError
from ampdbg.formats import FORMATS, FloatFormat
from ampdbg.levels import LEVELS
from ampdbg.precision.pins import pin_fp32


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
        """Continues as a GradScaler of this ``state_dict()`` would, within the bounds; a static scale does not."""
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
    """The scaler skips a step whose gradients are not finite."""
    return scaler.is_enabled() and not (isinstance(scaler, LossScaler) and scaler.never_skips)


DTYPES = {name: getattr(torch, name) for name in FORMATS}
"""torch's dtype of each format."""


@dataclass(frozen=True)
class PrecisionMode:
    """How a step is computed on one device: in FP32, unless a mode says otherwise."""

    precision: Precision
    device: torch.device

    @property
    def format(self) -> FloatFormat:
        """The narrowest format that a step computes in."""
        return self.precision.format

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype of that format."""
        dtype: torch.dtype = DTYPES[self.format.name]
        return dtype

    def converted(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """While this is entered, the model's weights and what goes in and out of it are as the mode has them."""
        return contextlib.nullcontext()

    def pinned(self, model: torch.nn.Module, patterns: Iterable[str]) -> AbstractContextManager[Any]:
        """While this is entered, the named modules run in FP32; see :func:`~ampdbg.precision.pins.pin_fp32`."""
        return pin_fp32(model, patterns)

    def in_half(self, dtype: str) -> AbstractContextManager[Any]:
        """A fresh context for one forward pass that computes in this half dtype what a step computes in half."""
        return torch.autocast(self.device.type, dtype=DTYPES[dtype])

    def forward(self) -> AbstractContextManager[Any]:
        """A fresh context for one forward pass and its losses."""
        return contextlib.nullcontext()

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler of one run; a disabled one hands losses and steps on."""
        return torch.amp.GradScaler(self.device.type, enabled=False)

    def updates_half_weights(self) -> bool:
        """An optimizer's step reads and writes half weights where the model has them."""
        return self.dtype is not torch.float16

    def master_weights(self) -> Iterable[torch.Tensor]:
        """The copies that the optimizer steps on instead of the model's weights."""
        return ()

    def step(
        self,
        scaler: torch.amp.GradScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_grad_norm: float | None = None,
    ) -> None:
        """Unscales and clips where asked, lets the scaler step or skip each optimizer, and updates the scale."""
        for optimizer in optimizers if clip_grad_norm is not None else ():
            scaler.unscale_(optimizer)
        clip(optimizers, clip_grad_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def clip(optimizers: Iterable[torch.optim.Optimizer], limit: float | None) -> None:
    """Clips the norm of all gradients of the optimizers together, as a loop does; None for no clipping.

    Raises:
        WorkloadError: a gradient is sparse.
    """
    if limit is None:
        return
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    parameters = [*dict.fromkeys(parameter for group in groups for parameter in group["params"])]
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise WorkloadError(
            "train.clip_grad_norm: torch clips no sparse gradients; leave the key out, or make the layer's gradients "
            "dense (nn.Embedding has sparse=False)"
        )
    torch.nn.utils.clip_grad_norm_(parameters, limit)


def mode_of(precision: Precision, device: torch.device) -> PrecisionMode:
    """The mode that the config's level asks for."""
    module = importlib.import_module(f"{__name__}.{LEVELS[precision.level].mode}")
    mode: PrecisionMode = module.MODE(precision, device)
    return mode
