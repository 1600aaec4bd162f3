"""Parameters and optimizer states as they are at one moment, copied, and put back into the very same tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampdbg.replay.run import Run

State = dict[Any, dict[str, tuple[Any, Any]]]
"""For each parameter the optimizer's state, each value with a copy."""


@dataclass(frozen=True)
class KeptWeights:
    """A copy of every parameter of a run, of its optimizers' states, and of their groups' settings."""

    parameters: Mapping[torch.nn.Parameter, torch.Tensor]
    states: tuple[tuple[torch.optim.Optimizer, State], ...]
    groups: tuple[tuple[dict[str, Any], dict[str, Any]], ...]

    @staticmethod
    def now(run: Run) -> KeptWeights:
        """What they are at this moment."""
        optimizers = run.workload.optimizers
        return KeptWeights(
            parameters={parameter: parameter.detach().clone() for parameter in run.workload.model.parameters()},
            states=tuple((optimizer, _state_of(optimizer)) for optimizer in optimizers),
            groups=tuple((group, dict(group)) for optimizer in optimizers for group in optimizer.param_groups),
        )

    def restore(self) -> None:
        """Makes them so again."""
        with torch.no_grad():
            for parameter, value in self.parameters.items():
                parameter.copy_(value)
            for optimizer, state in self.states:
                optimizer.state.clear()
                for parameter, kept in state.items():
                    optimizer.state[parameter] = {key: _put_back(*pair) for key, pair in kept.items()}
        for group, values in self.groups:
            group.update(values)


@contextlib.contextmanager
def weights_kept(run: Run) -> Iterator[None]:
    """Parameters and optimizers may change while this is entered; afterwards they are as before."""
    kept = KeptWeights.now(run)
    try:
        yield
    finally:
        kept.restore()


def _state_of(optimizer: torch.optim.Optimizer) -> State:
    return {
        parameter: {key: (value, copy.deepcopy(value)) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


def _put_back(value: Any, before: Any) -> Any:
    return value.copy_(before) if isinstance(value, torch.Tensor) else before
