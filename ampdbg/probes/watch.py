"""Watching a training loop through its GradScaler: one Step a ``scaler.update()``, nothing changed.

While a step is healthy the watcher reads only what the loop computes anyway. Whether the scaler withheld
a step is learnt without a sync: the optimizer's own pre-step hook was called, or it was not. Only then are
the gradients looked at, group by group. On a GPU the numbers of healthy steps are read in bulk.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ampdbg.record import GroupOverflow, Step, TensorCounts
from ampdbg.replacing import replaced

from .gradients import gradient_norm, group_name, nonfinite_groups
from .nonfinite import nonfinite_in_model

UNREAD_STEPS = 64
"""On a GPU so many healthy steps are kept as device scalars before one sync reads them all."""


@dataclass
class _OpenStep:
    """What is known of a step before ``update()`` closes it. Tensors here are scalars, still on the device."""

    scaled: list[torch.Tensor] = field(default_factory=list)
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    groups: list[GroupOverflow] = field(default_factory=list)
    nonfinite: list[TensorCounts] = field(default_factory=list)
    scale: torch.Tensor | None = None
    skipped: bool = False
    stepped: bool = False


class Watch:
    """The steps seen so far; made by :func:`watch`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self._model = model
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._on_step = on_step
        self._open: dict[int, _OpenStep] = {}
        self._unread: list[_OpenStep] = []
        self._steps: list[Step] = []
        self._fired: set[int] = set()
        self._batch: list[TensorCounts] = list(nonfinite_in_model(model))
        self._model_was_bad = bool(self._batch)
        self._losses: dict[str, torch.Tensor] = {}

    @property
    def steps(self) -> tuple[Step, ...]:
        """One for each ``scaler.update()`` so far; on a GPU this reads what is still unread (one sync)."""
        self._read()
        return tuple(self._steps)

    @property
    def groups(self) -> tuple[str, ...]:
        """The name of every parameter group, over all optimizers."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        return tuple(group_name(group, index) for index, group in enumerate(groups))

    def see_batch(self, found: Sequence[TensorCounts]) -> None:
        """Notes the non-finite leaves of a batch for the step that is under way."""
        self._batch.extend(found)

    def see_losses(self, losses: Mapping[str, torch.Tensor], weight: float = 1.0) -> None:
        """Adds unscaled losses (scalar tensors, by name) to the step; without this the scaled ones count."""
        for name, loss in losses.items():
            part = loss.detach().float() * weight
            self._losses[name] = self._losses[name] + part if name in self._losses else part

    def _step_of(self, scaler: GradScaler) -> _OpenStep:
        return self._open.setdefault(id(scaler), _OpenStep())

    def _scale(self, original: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
        step = self._step_of(scaler)
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        if isinstance(tensors, (list, tuple)):
            step.scaled += [tensor.detach().float().sum() for tensor in tensors]
        return original(scaler, outputs)

    def _unscale(self, original: Callable[..., Any], scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Any:
        result = original(scaler, optimizer)
        self._measure(self._step_of(scaler), optimizer, 1.0)
        return result

    def _step(
        self,
        original: Callable[..., Any],
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if id(optimizer) not in self._optimizers:
            return original(scaler, optimizer, *args, **kwargs)
        step = self._step_of(scaler)
        step.stepped = True
        enabled = scaler.is_enabled()
        # A fused optimizer unscales in its own kernel; a disabled scaler does not unscale at all.
        in_kernel = enabled and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if in_kernel or not enabled:
            self._measure(step, optimizer, scaler.get_scale() if in_kernel else 1.0)
        self._fired.discard(id(optimizer))
        result = original(scaler, optimizer, *args, **kwargs)
        withheld = enabled and (id(optimizer) not in self._fired or (in_kernel and _found_inf(scaler, optimizer)))
        if withheld or (not enabled and not _finite(step.norms.get(id(optimizer)))):
            step.groups += nonfinite_groups(optimizer, self._names, self._first_group(optimizer))
        step.skipped |= withheld
        return result

    def _update(self, original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        step = self._open.pop(id(scaler), _OpenStep())
        scale = scaler._get_scale_async() if scaler.is_enabled() else None
        step.scale = None if scale is None else scale.clone()
        result = original(scaler, *args, **kwargs)
        if step.stepped:
            self._close(step)
        return result

    def _measure(self, step: _OpenStep, optimizer: torch.optim.Optimizer, divisor: float) -> None:
        if id(optimizer) in self._optimizers and id(optimizer) not in step.norms:
            norm = gradient_norm(optimizer, divisor)
            if norm is not None:
                step.norms[id(optimizer)] = norm

    def _first_group(self, optimizer: torch.optim.Optimizer) -> int:
        index = 0
        for other in self._optimizers.values():
            if other is optimizer:
                break
            index += len(other.param_groups)
        return index

    def _close(self, step: _OpenStep) -> None:
        step.losses, self._losses = self._losses, {}
        step.nonfinite, self._batch = self._batch, []
        self._unread.append(step)
        on_cpu = all(tensor.device.type == "cpu" for tensor in _scalars(step))
        if step.skipped or on_cpu or self._on_step is not None or len(self._unread) >= UNREAD_STEPS:
            self._read()

    def _read(self) -> None:
        """Turns the unread steps into Steps, with one transfer for all of them."""
        unread, self._unread = self._unread, []
        scalars = [scalar for step in unread for scalar in _scalars(step)]
        values = iter(_to_host(scalars))
        for step in unread:
            made = _to_step(len(self._steps), step, values)
            if made.skipped or not _is_finite_number(made.loss):
                made = self._with_bad_tensors(made)
            self._steps.append(made)
            if self._on_step is not None:
                self._on_step(made)

    def _with_bad_tensors(self, step: Step) -> Step:
        """Adds the parameters and buffers that are not finite: once, at the first step that shows them."""
        if self._model_was_bad:
            return step
        found = nonfinite_in_model(self._model, "after")
        self._model_was_bad = bool(found)
        return replace(step, nonfinite=(*step.nonfinite, *found))

    def _finish(self) -> None:
        """Looks once more at parameters and buffers: a buffer can be poisoned while every loss is finite."""
        self._read()
        if self._steps and not self._model_was_bad:
            self._steps[-1] = self._with_bad_tensors(self._steps[-1])


@contextlib.contextmanager
def watch(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    on_step: Callable[[Step], None] | None = None,
) -> Iterator[Watch]:
    """Watches any training loop that uses a GradScaler (a disabled one too) on these optimizers.

    Args:
        model: names the parameters; its parameters and buffers are checked on unhealthy steps.
        optimizers: one or several; steps of others are left alone.
        on_step: called with each Step as it ends. On a GPU this costs one sync a step; without it none.
    """
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    watcher = Watch(model, several, on_step)
    with ExitStack() as stack:
        for name, method in _METHODS.items():
            original = getattr(GradScaler, name)
            wrapper = _wrapping(original, functools.partial(method, watcher, original))
            stack.enter_context(replaced(GradScaler, name, wrapper))
        for optimizer in several:
            handle = optimizer.register_step_pre_hook(functools.partial(_note_call, watcher._fired))
            stack.callback(handle.remove)
        try:
            yield watcher
        finally:
            watcher._finish()


_METHODS: dict[str, Callable[..., Any]] = {
    "scale": Watch._scale,
    "unscale_": Watch._unscale,
    "step": Watch._step,
    "update": Watch._update,
}


def _wrapping(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return method


def _note_call(fired: set[int], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    fired.add(id(optimizer))


def _found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    return any(bool(flag.item()) for flag in scaler._found_inf_per_device(optimizer).values())


def _finite(norm: torch.Tensor | None) -> bool:
    return norm is None or bool(torch.isfinite(norm))


def _is_finite_number(value: float) -> bool:
    return value - value == 0.0


def _scalars(step: _OpenStep) -> list[torch.Tensor]:
    scale = [] if step.scale is None else [step.scale]
    return [*(step.losses.values() if step.losses else step.scaled), *step.norms.values(), *scale]


def _to_host(scalars: list[torch.Tensor]) -> list[float]:
    if not scalars:
        return []
    device = scalars[0].device
    stacked = torch.stack([scalar.reshape(()).to(device, torch.float64) for scalar in scalars])
    return [float(value) for value in stacked.tolist()]


def _to_step(index: int, step: _OpenStep, values: Iterator[float]) -> Step:
    losses = {name: next(values) for name in step.losses}
    loss = sum(losses.values()) if losses else sum(next(values) for _ in step.scaled)
    squares = [next(values) ** 2 for _ in step.norms]
    return Step(
        step=index,
        loss=loss,
        scale=1.0 if step.scale is None else next(values),
        found_inf=step.skipped or bool(step.groups),
        skipped=step.skipped,
        grad_norm=sum(squares) ** 0.5 if squares else None,
        groups=tuple(step.groups),
        nonfinite=tuple(step.nonfinite),
        losses=losses if len(losses) > 1 else {},
    )
