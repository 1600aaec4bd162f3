"""The last calls of a forward pass that is run again by itself: they make a number of what its modules give, or lead
the gradients back to it that the step has had."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.probes.tensors import float_values, leaves_of
from ampdbg.replay.played_step import PlayedStep, TapedCall, made_in


@dataclass(frozen=True)
class PassEnd:
    """Calls a module at the end of a pass, and makes one scalar of what that gives: of its ``losses``, if any."""

    module: Callable[..., Any]
    losses: int

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of shape (). That of all its numbers leads nowhere: no gradient of it says anything of the step."""
        result = self.module(*args, **kwargs)
        if self.losses:
            leaves = [tensor for _, tensor in leaves_of(result) if tensor.requires_grad and tensor.numel() == 1]
            return torch.stack([tensor.reshape(()).float() for tensor in leaves]).sum()
        made = [tensor for _, tensor in made_in(result) if tensor.requires_grad]
        sums = [values.float().sum().cpu() for tensor in made if (values := float_values(tensor.detach())) is not None]
        return torch.stack([torch.zeros(()), *sums]).sum().requires_grad_()


@dataclass(frozen=True)
class GivenGradients:
    """A loss in the place of what functions made of a pass: whatever comes to what its calls gave, these ``gradients``
    go on, as they came at a loss scale of ``scale``. None is one that is not finite: what comes goes on."""

    gradients: tuple[torch.Tensor | None, ...]
    scale: float

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        """Zero, of shape ()."""
        total = torch.stack([_nothing_of(tensor) for tensor in given]).sum()
        came: list[torch.Tensor] = []
        total.register_hook(came.append)

        def instead(arrived: torch.Tensor, *, gradient: torch.Tensor) -> torch.Tensor:
            wide = torch.promote_types(arrived.dtype, torch.float32)
            return (gradient.to(wide) * (came[-1] / self.scale)).to(arrived.dtype)

        for tensor, gradient in zip(given, self.gradients, strict=True):
            if gradient is not None:
                tensor.register_hook(functools.partial(instead, gradient=gradient))
        return total


def _nothing_of(tensor: torch.Tensor) -> torch.Tensor:
    """Zero, to which the tensor leads all the same, whatever it holds."""
    nothing = torch.where(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0, tensor)
    return (torch.view_as_real(nothing) if nothing.is_complex() else nothing).sum().float()


def called_by(call: TapedCall) -> Callable[..., Any]:
    """What it calls, the module or function at a pass's end too."""
    return call.function.module if isinstance(call.function, PassEnd) else call.function


def module_of(call: TapedCall) -> torch.nn.Module | None:
    """The module that it calls; None where it calls a function."""
    called = called_by(call)
    return called if isinstance(called, torch.nn.Module) else None


def losses_of(played: PlayedStep) -> int:
    """How many losses a pass ends in; 0 where it ends in anything else."""
    found = [call.function.losses for call in played.calls if isinstance(call.function, PassEnd)]
    return sum(found) if all(found) else 0


def given_gradients(played: PlayedStep) -> GivenGradients | None:
    """Those that stand in the place of its loss; None where it has one."""
    return next((call.function for call in played.calls if isinstance(call.function, GivenGradients)), None)


def rest(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What calls within a pass give and no other takes, for a ``PassEnd`` of it."""
    return given
