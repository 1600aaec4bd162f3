"""The whole model in half, like Apex's O3: no FP32 weights, and a static loss scale that defaults to 1.

``docs/apex.md`` compares this mode point by point with the last release of ``apex/amp``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ampdbg.errors import WorkloadError, first_line
from ampdbg.precision.modes import LossScaler, PrecisionMode
from ampdbg.precision.pins import pin_fp32, pinned_names
from ampdbg.precision.widening import LIFTS, altered, cast, lifted, widened
from ampdbg.record.pins import OWN, is_pinned

LEVEL = {"name": "O3", "words": "all half", "loss_scale": 1.0, "has_half_weights": True}


@dataclass(frozen=True)
class HalfModel(PrecisionMode):
    """Weights, buffers and model inputs are half; model outputs are float32.

    With master weights, each half weight has a float32 copy that the optimizer updates. Updates too small for the
    half weight accumulate there.
    """

    masters: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Maps each half weight to its master, from the weight's first step on."""

    keeps_norms: ClassVar[bool] = False
    """True if batch norms stay FP32 by default, that is, if ``precision.keep_norms_fp32`` is null."""

    has_masters: ClassVar[bool] = False
    """True if master weights exist by default, that is, if ``precision.master_weights`` is null."""

    @contextlib.contextmanager
    def converted(self, model: torch.nn.Module) -> Iterator[None]:
        """Convert the weights permanently, and cast the model's inputs and outputs inside this context.

        Raises:
            WorkloadError: torch cannot convert a weight or a buffer.
        """
        for name, module in self._lowered(model):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    self._lower(tensor, name)
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()
        hooks = (  # called through Module: a scripted module rejects registration on itself but runs such hooks
            torch.nn.Module.register_forward_pre_hook(model, self._inputs, with_kwargs=True),
            torch.nn.Module.register_forward_hook(model, lambda module, inputs, output: cast(output, torch.float32)),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _lower(self, tensor: torch.Tensor, module: str) -> None:
        try:
            tensor.data = tensor.data.to(self.dtype)
        except Exception as error:  # noqa: BLE001 - a tensor's class, or a device's allocator
            kind = "weight" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            raise WorkloadError(
                f"precision.level: {self.precision.level} makes the whole model {self.format.name}, and torch cannot "
                f"make a {kind} of {module or 'the model itself'} that: {first_line(error)}; allowed: a model that "
                f".to(torch.{self.format.name}) takes; with O1 weights and buffers stay as they are"
            ) from None

    def _inputs(self, model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Check for both half dtypes: in the bfloat16 shadow, the weights and the result of this cast are bfloat16.
        is_half = any(tensor.dtype in LIFTS["float32"] for tensor in model.parameters())
        return cast((args, kwargs), self.dtype) if is_half else (args, kwargs)

    def _lowered(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the name and module of each module with weights and buffers to convert to half."""
        asked = self.precision.keep_norms_fp32
        keeps_norms = self.keeps_norms if asked is None else asked
        pins = pinned_names(model, self.precision.pins)
        for name, module in model.named_modules():
            is_kept_norm = keeps_norms and isinstance(module, _BatchNorm) and module.affine
            if not is_kept_norm and not is_pinned(name, pins):
                yield name, module

    @contextlib.contextmanager
    def pinned(self, model: torch.nn.Module, patterns: Iterable[str]) -> Iterator[None]:
        """Run the named modules in FP32 with float32 weights inside this context. Their outputs are cast to half.

        A module that shares a weight with a pinned module is pinned too, because it could not take half inputs.
        """
        with ExitStack() as stack:
            modules, pins = dict(model.named_modules()), pinned_names(model, patterns)
            weights = {name: set(module.parameters(recurse=False)) for name, module in modules.items()}
            held = set().union(*(weights.pop(name) for name in modules if is_pinned(name, pins)))
            tied = [name + OWN for name, own in weights.items() if own & held]
            for name in stack.enter_context(pin_fp32(model, (*pins, *tied), returns=self.dtype)).modules:
                module, is_whole = modules[name.removesuffix(OWN)], not name.endswith(OWN)
                tensors = (*module.parameters(recurse=is_whole), *module.buffers(recurse=is_whole))
                stack.enter_context(altered(tensors, functools.partial(widened, wider=LIFTS["float32"])))
            yield

    def in_half(self, dtype: str) -> AbstractContextManager[Any]:
        """Return a context that keeps ops in ``dtype``. The weights must already have it."""
        return lifted(dtype)

    def updates_half_weights(self) -> bool:
        asked = self.precision.master_weights
        return not (self.has_masters if asked is None else asked)

    def master_weights(self) -> Iterable[torch.Tensor]:
        """Return the masters that exist: a weight has one from its first step on."""
        return self.masters.values()

    def scaler(self) -> torch.amp.GradScaler:
        """Return a scaler that unscales half gradients, or a disabled one for a static scale of 1."""
        if self.dtype is not torch.float16 or self.precision.loss_scale == 1.0:
            return super().scaler()
        return LossScaler(self.device.type, self.precision.loss_scale, takes_half_gradients=True)

    def step(
        self,
        scaler: torch.amp.GradScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_grad_norm: float | None = None,
    ) -> None:
        """Step as :class:`PrecisionMode` does, on the master weights if they exist."""
        with contextlib.nullcontext() if self.updates_half_weights() else self._on_masters(optimizers):
            super().step(scaler, optimizers, clip_grad_norm)

    @contextlib.contextmanager
    def _on_masters(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Inside this context, each half weight of an optimizer holds its master, with its gradient in float32.

        The tensor objects do not change, so names, parameter groups and optimizer state remain valid.
        """
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        weights = [weight for group in groups for weight in group["params"] if weight.dtype is self.dtype]
        halves = [(weight, weight.data) for weight in weights]
        try:
            for weight, half in halves:
                gradient, weight.grad = weight.grad, None
                weight.data = self.masters.setdefault(weight, half.float())
                weight.grad = None if gradient is None else gradient.float()
            yield
        finally:
            for weight, half in halves:
                weight.grad = None
                weight.data = half.copy_(weight.data)


MODE = HalfModel
