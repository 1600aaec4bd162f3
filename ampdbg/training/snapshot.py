"""What a step needs to be run again: its batches, the random state and the buffers from before it.

The weights are not copied: a replay is made while they are still those of the step, before the optimizer
has written them or after the scaler has withheld it.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomState:
    """The random state of Python, NumPy (where it is in use), torch and its GPUs."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]

    @staticmethod
    def now() -> RandomState:
        """The state at this moment."""
        numpy = sys.modules.get("numpy")
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return RandomState(random.getstate(), numpy and numpy.random.get_state(), torch.get_rng_state(), devices)

    def restore(self) -> None:
        """Makes this the state of the process."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))


@dataclass(frozen=True)
class Snapshot:
    """A step as it was before its forward pass. ``batches`` has one entry a micro-batch, on the device."""

    step: int
    batches: tuple[Any, ...]
    random_state: RandomState
    buffers: dict[str, torch.Tensor]


def take_snapshot(model: torch.nn.Module, step: int, batches: tuple[Any, ...]) -> Snapshot:
    """The step that is about to run; its buffers are copied, its batches are not."""
    with torch.no_grad():
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Snapshot(step, batches, RandomState.now(), buffers)


@contextlib.contextmanager
def rewound(model: torch.nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """Random state and buffers as they were before the step, gradients cleared; afterwards all is as it is now."""
    now = take_snapshot(model, snapshot.step, ())
    # The step may register a buffer again as a new tensor: the tensors themselves are kept too.
    # A scripted module keeps its own in C++, where none can be put back.
    eager = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    registered = [(module, dict(module._buffers)) for module in eager]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        _write_buffers(model, snapshot)
        snapshot.random_state.restore()
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, buffers in registered:
            module._buffers.clear()
            module._buffers.update(buffers)
        _write_buffers(model, now)
        now.random_state.restore()


def _write_buffers(model: torch.nn.Module, snapshot: Snapshot) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in snapshot.buffers and buffer.shape == snapshot.buffers[name].shape:
                buffer.copy_(snapshot.buffers[name])
