"""An unhealthy step that can be run again at any later time: its snapshot, and a copy of the weights it had."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ampdbg.record.replays import Investigation
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import RandomState, Snapshot


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
