"""A step that is under way: what is known of it as scalars on the device, and how it becomes a Step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ampdbg.record.run import GroupOverflow, Step, TensorCounts


@dataclass
class OpenStep:
    """What is known of a step before it is closed. Tensors here are scalars, still on the device.

    ``scaler`` is the enabled one that has scaled a loss, ``bare`` holds the optimizers (by ``id``) whose own
    step was called by the loop itself, and ``before_closure`` how many losses there were by then.
    """

    scaled: list[torch.Tensor] = field(default_factory=list)
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    groups: list[GroupOverflow] = field(default_factory=list)
    nonfinite: list[TensorCounts] = field(default_factory=list)
    bare: set[int] = field(default_factory=set)
    scaler: GradScaler | None = None
    scale: torch.Tensor | None = None
    skipped: bool = False
    stepped: bool = False
    before_closure: int = 0

    def add_losses(self, outputs: Any) -> None:
        """Adds what goes backward: scalar losses as they are, other tensors as their sum."""
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        if isinstance(tensors, (list, tuple)):
            parts = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
            self.scaled += [tensor.detach().float().sum() for tensor in parts]

    def loss_scale(self) -> float:
        """The loss scale of now; without asking for it as the loop would. On a GPU this syncs."""
        scale = self.scaler._get_scale_async() if self.scaler is not None else None
        return 1.0 if scale is None else float(scale)

    def note_scale(self) -> None:
        """Keeps the loss scale of now, and lets go of the scaler."""
        scale = self.scaler._get_scale_async() if self.scaler is not None else None
        self.scale = None if scale is None else scale.clone()
        self.scaler = None

    def scalars(self) -> list[torch.Tensor]:
        """Every number that :meth:`to_step` needs, in its order."""
        scale = [] if self.scale is None else [self.scale]
        return [*(self.losses.values() if self.losses else self.scaled), *self.norms.values(), *scale]

    def to_step(self, index: int, values: Iterator[float]) -> Step:
        """The Step, with the values of :meth:`scalars` on the host."""
        losses = {name: next(values) for name in self.losses}
        loss = sum(losses.values() if losses else (next(values) for _ in self.scaled), start=0.0)
        squares = [next(values) ** 2 for _ in self.norms]
        return Step(
            step=index,
            loss=loss,
            scale=1.0 if self.scale is None else next(values),
            found_inf=self.skipped or bool(self.groups),
            skipped=self.skipped,
            grad_norm=sum(squares) ** 0.5 if squares else None,
            groups=tuple(self.groups),
            nonfinite=tuple(self.nonfinite),
            losses=losses if len(losses) > 1 else {},
        )


def to_host(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of scalar tensors, with one transfer for all of them."""
    if not scalars:
        return []
    device = scalars[0].device
    stacked = torch.stack([scalar.reshape(()).to(device, torch.float64) for scalar in scalars])
    return [float(value) for value in stacked.tolist()]


def is_finite_scalar(norm: torch.Tensor | None) -> bool:
    """Whether a norm is finite, or there is none. On a GPU this syncs."""
    return norm is None or bool(torch.isfinite(norm))
