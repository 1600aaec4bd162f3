"""What a step needs to be run again: its batches, the random state, buffers and attributes from before it.

The weights are not copied for it: a replay is made while they are still those of the step, before the optimizer
has written them or after the scaler has withheld it. Only around the replay itself there is a copy of them.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ampdbg.replay.attributes import Attributes, Versions
from ampdbg.replay.held import put_back


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
    """A step as it was before its forward pass. ``batches`` has one entry a micro-batch, on the device.

    ``weights`` are copies of the model's parameters, in order, where the step is to be run again later.
    """

    step: int
    batches: tuple[Any, ...]
    random_state: RandomState
    buffers: dict[str, torch.Tensor]
    attributes: Attributes = field(default_factory=Attributes)
    weights: tuple[torch.Tensor, ...] = ()


def take_snapshot(
    model: torch.nn.Module, step: int, batches: tuple[Any, ...], versions: Versions | None = None
) -> Snapshot:
    """The step that is about to run; its buffers are copied, its batches are not.

    ``versions`` are those of the tensors among the attributes at the step before, and become this one's.
    """
    with torch.no_grad():
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        attributes = Attributes.now(model, Versions() if versions is None else versions)
    return Snapshot(step, batches, RandomState.now(), buffers, attributes)


@contextlib.contextmanager
def rewound(model: torch.nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """The model and the random state as they were before the step, but for the weights, which are those of now.

    Gradients are cleared. Afterwards all is as it is now, the weights too, should the step write into them.
    """
    random_state = RandomState.now()
    with put_back(model, snapshot.weights) as held:
        try:
            snapshot.attributes.write(model, held)
            _write_buffers(model, snapshot)
            snapshot.random_state.restore()
            yield
        finally:
            random_state.restore()


def _write_buffers(model: torch.nn.Module, snapshot: Snapshot) -> None:
    for name, buffer in model.named_buffers():
        if name in snapshot.buffers and buffer.shape == snapshot.buffers[name].shape:
            buffer.data.copy_(snapshot.buffers[name])
