"""Optimizers that get gradients and are never stepped, while others of the loop are: what they train stays as it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampdbg.probes.watch import Watch
from ampdbg.quantities import counted

ENOUGH = 8
"""So many steps have to have ended, and so many backward passes to have written the gradients: one optimizer may step
once in several steps of another."""

IDLE = "{} has not been stepped in {}, though {} have written its gradients: what it trains is as it was"


class IdleOptimizers:
    """Looks for them after the 8th, 16th, 32nd … step; by the end a script's function may have let go of them."""

    def __init__(self, watcher: Watch) -> None:
        self._watcher = watcher
        self._due = ENOUGH
        self._names: dict[int, str] = {}

    def step_ended(self) -> None:
        """To be called when a step has ended."""
        if self._watcher.log.closed() >= self._due:
            self._due *= 2
            self._names = dict(self._idle())

    @property
    def notes(self) -> tuple[str, ...]:
        """One for each that was found and has not been stepped since."""
        calls, steps = self._watcher.calls, counted(self._watcher.log.closed(), "step")
        passes = [(name, calls.passes_without_step(place)) for place, name in self._names.items()]
        return tuple(IDLE.format(name, steps, counted(many, "backward pass")) for name, many in passes if many)

    def _idle(self) -> Iterator[tuple[int, str]]:
        """The place and the name of each. Where another optimizer trains some of the same weights, or they have moved
        all the same, it is meant. On a GPU this syncs, where one has not been stepped."""
        calls, optimizers = self._watcher.calls, self._watcher.optimizers
        passes = [(one, calls.passes_without_step(calls.place_of(one))) for one in optimizers]
        others = {id(weight) for one, many in passes if many is None for weight in _weights_of(one)}
        for one, many in passes:
            weights = [weight for weight in _weights_of(one) if weight.requires_grad]
            is_alone = bool(others) and bool(weights) and others.isdisjoint(map(id, weights))
            if (many or 0) >= ENOUGH and is_alone and optimizers.are_weights_as_they_began(one):
                yield calls.place_of(one), self._name(one, weights)

    def _name(self, optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> str:
        names = {id(weight): name for name, weight in self._watcher.models.named_parameters()}
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        return f"{type(optimizer).__name__} of {names.get(id(weights[0]), 'its first parameter')}{more}"


def _weights_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])
