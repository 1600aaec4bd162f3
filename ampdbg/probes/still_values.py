"""Half values that never change, for optimizers that ampdbg cannot compare with float32 updates.

Only the written values of such an optimizer are known. At growing intervals a sample of each half parameter is compared
bitwise with its first sample, before a step. A GPU is synchronized only at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ampdbg.probes.averages import sampling_stride
from ampdbg.probes.dtype_contract import MASTERS, OTHERS
from ampdbg.probes.tensors import HALVES, stored
from ampdbg.record.run import StillParameter

LEAST_STEPS = 32
"""Values that have not changed in fewer steps may change soon."""

MOVED = 1 / 32
"""A parameter is not frozen if a larger share of its values has changed. Stochastic rounding moves some values."""

LEAST_VALUES = 16
"""Fewer values of a kind of parameter are too few for a verdict."""

MASTER_STATE_NAMES = re.compile(f"{MASTERS.pattern}|kahan|comp|resid|remain|shift|error")
"""Names of optimizer state with a float32 master, or with the rounding error of the half values."""

FindNames = Callable[[], Mapping[int, tuple[str, str]]]
"""Returns the name and the kind of each parameter by its ``id``; called only when needed."""


@dataclass
class SampledValues:
    """Some values of a half parameter, with its name and its kind.

    Attributes:
        at_first: The values in the first sample.
        began: The optimizer's step count at the first sample; ``steps`` counts the steps since.
        rate: The sum of the learning rates until the first sample; ``rate_now`` is the sum until the last.
        moved: True for changed values; ``driven`` counts finite nonzero gradients of each value in ``looks`` samples.
        is_kept: True if the optimizer keeps a float32 master or the rounding error.
    """

    name: str
    kind: str
    at_first: torch.Tensor
    began: int
    rate: Any

    def __post_init__(self) -> None:
        self.moved = torch.zeros_like(self.at_first, dtype=torch.bool)
        self.driven, self.is_kept = self.moved.int(), self.moved.any()
        self.looks, self.steps, self.rate_now = 0, 0, self.rate

    def look(self, now: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Compare a new sample with the first. ``state`` has samples of the optimizer's state for the parameter."""
        self.looks += 1
        self.moved |= now.view(torch.int16) != self.at_first.view(torch.int16)  # compare bits, so that NaN equals NaN
        self.driven += (gradient != 0) & gradient.isfinite()
        for key, values in state.items():
            is_master = (values.to(now.dtype) == now).all() if values.dtype is torch.float32 else self.is_kept
            self.is_kept = self.is_kept | is_master | bool(MASTER_STATE_NAMES.search(key))

    @property
    def counted(self) -> torch.Tensor:
        """True for values that count. They had a gradient in half of the samples. Steps as large as the learning rate
        would have moved them by a unit in the last place."""
        unit = self.at_first.float().abs() * torch.finfo(self.at_first.dtype).eps
        return (2 * self.driven >= self.looks) & (unit <= float(self.rate_now - self.rate))

    @property
    def seen(self) -> StillParameter:
        """The number of values that count, and of changed values with as many gradients."""
        moved = self.moved & (2 * self.driven >= self.looks)
        return StillParameter(self.name, self.kind, int(self.counted.sum()), int(moved.sum()), self.steps)


class StillValues:
    """The sampled half parameters of one optimizer."""

    def __init__(self) -> None:
        self._sampled: dict[int, SampledValues] = {}
        self._rates: dict[int, Any] = {}
        self._steps = self._next = 0

    def before(self, optimizer: Optimizer, names: FindNames) -> None:
        """Sample the parameters at growing intervals; call this right before each step of the optimizer."""
        if self._steps >= self._next:
            self._next = self._steps + max(1, self._steps // 4)
            for index in range(len(optimizer.param_groups)):
                self._look(optimizer, index, names)
        self._steps += 1
        for index, group in enumerate(optimizer.param_groups):  # d is D-adaptation's estimate
            self._rates[index] = self._rates.get(index, 0.0) + (group.get("lr") or 0.0) * group.get("d", 1.0)

    def _look(self, optimizer: Optimizer, group: int, names: FindNames) -> None:
        rate, placed = self._rates.get(group, 0.0), enumerate(optimizer.param_groups[group]["params"])
        half = {place: one for place, one in placed if one.dtype in HALVES and has_dense_gradient(one)}
        known = names() if any(id(one) not in self._sampled for one in half.values()) else {}
        for place, parameter in half.items():
            now, state = sample_of(parameter), optimizer.state.get(parameter, {})
            if id(parameter) not in self._sampled:
                of = known.get(id(parameter), (f"group {group}, parameter {place}", OTHERS))
                self._sampled[id(parameter)] = SampledValues(*of, now.clone(), self._steps, rate)
            sampled = self._sampled[id(parameter)]
            sampled.steps, sampled.rate_now = self._steps - sampled.began, rate
            alike = {key: one for key, one in state.items() if getattr(one, "shape", None) == parameter.shape}
            sampled.look(now, sample_of(parameter.grad), {key: sample_of(one) for key, one in alike.items()})

    @property
    def still(self) -> Iterator[StillParameter]:
        """The parameters with almost no changed values, in kinds with enough values that count."""
        known = [one.seen for one in self._sampled.values() if one.steps >= LEAST_STEPS and not bool(one.is_kept)]
        still = [one for one in known if one.moved <= MOVED * one.entries]
        for kind in dict.fromkeys(one.kind for one in still):
            of_it = [one for one in still if one.kind == kind and one.entries]
            yield from of_it if sum(one.entries for one in of_it) >= LEAST_VALUES else ()

    @property
    def names(self) -> set[str]:
        """The names of the half parameters that have had a gradient."""
        return {one.name for one in self._sampled.values()}


def has_dense_gradient(parameter: torch.Tensor) -> bool:
    """True if the parameter has a gradient that stores a value for each value of the parameter."""
    return parameter.grad is not None and parameter.grad.layout is torch.strided


def sample_of(tensor: Any) -> torch.Tensor:
    """Return some values of a tensor, always at the same positions."""
    values = stored(tensor.detach()).flatten()
    return values[:: sampling_stride(tensor.ndim, len(values))]
