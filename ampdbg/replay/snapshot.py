"""What a step needs to be run again: its batches, the random state, buffers and attributes from before it.

The weights are not copied for it: a replay is made while they are still those of the step, before the optimizer
has written them or after the scaler has withheld it. Only around the replay itself there is a copy of them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampdbg.record.replays import Investigation
from ampdbg.replay.run import Run
from ampdbg.replay.state import Attributes, Versions, put_back


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


@dataclass(frozen=True)
class FailingStep:
    """A step that was investigated. ``weights`` are copies, in the order of the model's parameters."""

    made: Investigation
    snapshot: Snapshot
    scale: float
    weights: tuple[torch.Tensor, ...]


def failing_step(model: torch.nn.Module, snapshot: Snapshot, scale: float, made: Investigation) -> FailingStep:
    """The step with the weights that the model has now: to be called while those are still the step's."""
    weights = tuple(weight.detach().clone() for weight in model.parameters())
    lasting = replace(snapshot, attributes=snapshot.attributes.settled(), weights=weights)
    return FailingStep(made, lasting, scale, weights)


@contextlib.contextmanager
def weights_of(model: torch.nn.Module, failing: FailingStep) -> Iterator[None]:
    """The model has the weights of the step; afterwards those that it has now."""
    now = [weight.detach().clone() for weight in model.parameters()]
    _write(model, failing.weights)
    try:
        yield
    finally:
        _write(model, now)


def further_steps(run: Run, failing: FailingStep, count: int) -> Iterator[Snapshot]:
    """The failing step on the batches that come after its own in the data, ``count`` times."""
    micro = len(failing.snapshot.batches)
    batches = itertools.islice(run.workload.batches(), (failing.snapshot.step + 1) * micro, None)
    for _ in range(count):
        taken = tuple(itertools.islice(batches, micro))
        yield replace(failing.snapshot, batches=taken, random_state=RandomState.now())


def _write(model: torch.nn.Module, weights: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
