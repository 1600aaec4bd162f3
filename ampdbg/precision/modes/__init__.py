"""Precision modes, one file per value of ``precision.level``, and their loss scaler: how a step casts and scales.

Each file defines ``MODE``, its class, and ``LEVEL``, a literal with the fields of a ``Level``. :mod:`ampdbg.levels`
reads the literal without importing the file.
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
    """A GradScaler with optional bounds on its scale. A scale given as a number never changes.

    ``takes_half_gradients`` gives it the behavior of Apex's ``LossScaler`` (``apex/amp/scaler.py``). It then unscales
    gradients of half weights, which GradScaler rejects, and a static scale never skips a step.
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
        """Update the scale within the bounds. An explicit ``new_scale`` may exceed them."""
        super().update(new_scale)
        if new_scale is None and self._scale is not None and self._bounds != (None, None):
            self._scale.clamp_(*self._bounds)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Load a GradScaler's ``state_dict()``, with its scale clamped to the bounds. A static scale ignores it."""
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
    """True if the scaler skips steps with gradients that are not finite."""
    return scaler.is_enabled() and not (isinstance(scaler, LossScaler) and scaler.never_skips)


DTYPES = {name: getattr(torch, name) for name in FORMATS}
"""The torch dtype of each format, by the format's name."""


@dataclass(frozen=True)
class PrecisionMode:
    """How a step runs on one device: in FP32 unless a subclass overrides a method."""

    precision: Precision
    device: torch.device

    @property
    def format(self) -> FloatFormat:
        """The narrowest format in which a step computes."""
        return self.precision.format

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = DTYPES[self.format.name]
        return dtype

    def converted(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Convert the model's weights, inputs and outputs as the mode requires, inside this context."""
        return contextlib.nullcontext()

    def pinned(self, model: torch.nn.Module, patterns: Iterable[str]) -> AbstractContextManager[Any]:
        """Run the named modules in FP32 inside this context; see :func:`~ampdbg.precision.pins.pin_fp32`."""
        return pin_fp32(model, patterns)

    def in_half(self, dtype: str) -> AbstractContextManager[Any]:
        """Return a new context for one forward pass. The mode's half computations run in ``dtype`` there."""
        return torch.autocast(self.device.type, dtype=DTYPES[dtype])

    def forward(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scaler(self) -> torch.amp.GradScaler:
        """Return the loss scaler of one run. A disabled scaler forwards losses and steps unchanged."""
        return torch.amp.GradScaler(self.device.type, enabled=False)

    def updates_half_weights(self) -> bool:
        """True if an optimizer step reads and writes the model's half weights, where it has any."""
        return self.dtype is not torch.float16

    def master_weights(self) -> Iterable[torch.Tensor]:
        """Return the copies that the optimizer updates instead of the model's weights."""
        return ()

    def step(
        self,
        scaler: torch.amp.GradScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_grad_norm: float | None = None,
    ) -> None:
        """Unscale and clip on request, let the scaler step or skip each optimizer, and update the scale."""
        for optimizer in optimizers if clip_grad_norm is not None else ():
            scaler.unscale_(optimizer)
        clip(optimizers, clip_grad_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def clip(optimizers: Iterable[torch.optim.Optimizer], limit: float | None) -> None:
    """Clip the joint gradient norm of all optimizers, as a training loop does. ``None`` disables clipping.

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
    """Return the mode of the config's precision level."""
    module = importlib.import_module(f"{__name__}.{LEVELS[precision.level].mode}")
    mode: PrecisionMode = module.MODE(precision, device)
    return mode
