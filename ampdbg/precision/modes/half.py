"""The whole model in half, as Apex's O3: no FP32 weights, and a static loss scale of 1 unless another is given.

What it does is compared with ``apex/amp`` of its last release, point by point, in ``docs/apex.md``.
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
    """Weights, buffers and what goes into the model are half; what comes out is float32.

    With master weights each half weight has a copy in float32, which the optimizer steps on: what is too small for the
    half weight adds up there.
    """

    masters: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """The master of each half weight from its first step on."""

    keeps_norms: ClassVar[bool] = False
    """Batch norms stay FP32 where ``precision.keep_norms_fp32`` is null."""

    has_masters: ClassVar[bool] = False
    """There are master weights where ``precision.master_weights`` is null."""

    @contextlib.contextmanager
    def converted(self, model: torch.nn.Module) -> Iterator[None]:
        """As :class:`PrecisionMode`; weights stay converted afterwards, and casts of inputs and outputs go.

        Raises:
            WorkloadError: torch cannot convert a weight or a buffer.
        """
        for name, module in self._lowered(model):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    self._lower(tensor, name)
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()
        hooks = (  # a scripted module refuses them for itself, and calls those that it is given in this way
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
        # Of either half: the shadow's weights are bfloat16, and so is what this cast makes there.
        is_half = any(tensor.dtype in LIFTS["float32"] for tensor in model.parameters())
        return cast((args, kwargs), self.dtype) if is_half else (args, kwargs)

    def _lowered(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules, by name, whose own weights and buffers become half."""
        asked = self.precision.keep_norms_fp32
        keeps_norms = self.keeps_norms if asked is None else asked
        pins = pinned_names(model, self.precision.pins)
        for name, module in model.named_modules():
            is_kept_norm = keeps_norms and isinstance(module, _BatchNorm) and module.affine
            if not is_kept_norm and not is_pinned(name, pins):
                yield name, module

    @contextlib.contextmanager
    def pinned(self, model: torch.nn.Module, patterns: Iterable[str]) -> Iterator[None]:
        """As :class:`PrecisionMode`: their weights are float32 meanwhile, and what comes out of them is half again.

        A module that shares a weight with one of them is pinned as well: it would take no half input.
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
        """As :class:`PrecisionMode`, with weights that have the dtype now."""
        return lifted(dtype)

    def updates_half_weights(self) -> bool:
        asked = self.precision.master_weights
        return not (self.has_masters if asked is None else asked)

    def master_weights(self) -> Iterable[torch.Tensor]:
        """As :class:`PrecisionMode`, from the first step on."""
        return self.masters.values()

    def scaler(self) -> torch.amp.GradScaler:
        """One that unscales half gradients; none for a static scale of 1."""
        if self.dtype is not torch.float16 or self.precision.loss_scale == 1.0:
            return super().scaler()
        return LossScaler(self.device.type, self.precision.loss_scale, takes_half_gradients=True)

    def step(
        self,
        scaler: torch.amp.GradScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_grad_norm: float | None = None,
    ) -> None:
        """As :class:`PrecisionMode`, on the master weights where there are any."""
        with contextlib.nullcontext() if self.updates_half_weights() else self._on_masters(optimizers):
            super().step(scaler, optimizers, clip_grad_norm)

    @contextlib.contextmanager
    def _on_masters(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """While this is entered, each half weight of an optimizer is its master, with its gradient in float32.

        The very same objects, so that names, groups and the optimizer's state stay what they are.
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
