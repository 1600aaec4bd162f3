"""Half values that never change under an optimizer whose updates cannot be compared with float32's.

Nothing is known of such an optimizer but what it writes: before some of its steps, ever fewer of them, a sample of each
half parameter is held against what that was at first, by its bits. A GPU is waited for at the end alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ampdbg.probes.averages import SAMPLE, WHOLE
from ampdbg.probes.dtype_contract import MASTERS, OTHERS
from ampdbg.probes.tensors import HALVES, stored
from ampdbg.record.run import StillParameter

LEAST_STEPS = 32
"""Values that have not changed in fewer steps may do so soon."""

MOVED = 1 / 32
"""Where a larger share of a parameter's values has changed, it does not stand still: rounding by chance moves some."""

LEAST_VALUES = 16
"""Fewer values of a kind of parameter say nothing."""

KEPT = re.compile(f"{MASTERS.pattern}|kahan|comp|resid|remain|shift|error")
"""What optimizers call that which they keep of a parameter beside its half values."""

FindNames = Callable[[], Mapping[int, tuple[str, str]]]
"""The name and the kind of each parameter by its ``id``, looked up where it is called."""


@dataclass
class SampledValues:
    """Some values of a half parameter as they were ``at_first``, with its name and its kind.

    ``looks`` later it is known which have ``moved``, and how often each had a gradient that was finite and not zero:
    ``driven``. The optimizer had taken ``began`` steps then, and its learning rates had added up to ``rate``; ``steps``
    later that was ``rate_now``. ``is_kept``: the optimizer keeps it in float32 as well, or what rounding took.
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
        """Notes what has become of it; ``state`` has what the optimizer keeps of its values."""
        self.looks += 1
        self.moved |= now.view(torch.int16) != self.at_first.view(torch.int16)  # by its bits NaN is what it was
        self.driven += (gradient != 0) & gradient.isfinite()
        for key, values in state.items():
            is_master = (values.to(now.dtype) == now).all() if values.dtype is torch.float32 else self.is_kept
            self.is_kept = self.is_kept | is_master | bool(KEPT.search(key))

    @property
    def counted(self) -> torch.Tensor:
        """Which values count: those that had a gradient at half of the looks, and that steps of the learning rate's
        size would have taken further than a unit in the last place."""
        unit = self.at_first.float().abs() * torch.finfo(self.at_first.dtype).eps
        return (2 * self.driven >= self.looks) & (unit <= float(self.rate_now - self.rate))

    @property
    def seen(self) -> StillParameter:
        """How many values count, and how many have changed of all that had as many gradients."""
        moved = self.moved & (2 * self.driven >= self.looks)
        return StillParameter(self.name, self.kind, int(self.counted.sum()), int(moved.sum()), self.steps)


class StillValues:
    """Those of the half parameters of one optimizer."""

    def __init__(self) -> None:
        self._sampled: dict[int, SampledValues] = {}
        self._rates: dict[int, Any] = {}
        self._steps = self._next = 0

    def before(self, optimizer: Optimizer, names: FindNames) -> None:
        """To be called right before each step of it."""
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
        """The parameters of which hardly a value has changed, of kinds that have enough of such values."""
        known = [one.seen for one in self._sampled.values() if one.steps >= LEAST_STEPS and not bool(one.is_kept)]
        still = [one for one in known if one.moved <= MOVED * one.entries]
        for kind in dict.fromkeys(one.kind for one in still):
            of_it = [one for one in still if one.kind == kind and one.entries]
            yield from of_it if sum(one.entries for one in of_it) >= LEAST_VALUES else ()

    @property
    def names(self) -> set[str]:
        """Those of the half parameters that have had a gradient."""
        return {one.name for one in self._sampled.values()}


def has_dense_gradient(parameter: torch.Tensor) -> bool:
    """There is one, and its values are those of the parameter's places."""
    return parameter.grad is not None and parameter.grad.layout is torch.strided


def sample_of(tensor: Any) -> torch.Tensor:
    """Some values of a tensor, always the same ones."""
    values = stored(tensor.detach()).flatten()
    return values[:: 1 if tensor.ndim < 2 or len(values) <= WHOLE else len(values) // SAMPLE | 1]
