"""Half values that never change, for optimizers that ampdbg cannot compare with float32 updates.

Only the written values of such an optimizer are known. At growing intervals a sample of each half parameter is compared
bitwise with its first sample, before a step. A GPU is synchronized only at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ampdbg.probes.averages import is_dense, sample_of
from ampdbg.probes.dtype_contract import MASTERS, OTHERS
from ampdbg.probes.tensors import HALVES
from ampdbg.record.run import StillParameter

LEAST_STEPS = 32
"""Values that have not changed in fewer steps may change soon."""

MOVED = 1 / 32
"""A parameter is not frozen if a larger share of its values has changed. Stochastic rounding moves some values."""

LEAST_VALUES = 16
"""Fewer values of a kind of parameter are too few for a verdict."""

MASTER_STATE_NAMES = re.compile(f"{MASTERS.pattern}|kahan|comp|resid|remain|shift|error")
"""Names of optimizer state with a float32 master, or with the rounding error of the half values."""

NORMALIZED = frozenset({"Adafactor", "Lion", "Muon", "SparseAdam"})
"""Optimizers whose steps do not grow with the gradient, by class name. For others the moved values show it."""

FITS_BETTER, STRAIGHT = 0.9, 0.25
"""The law of SGD fits if its spread is smaller by this factor: 0.60 to 0.87 for five kinds of SGD, above 0.93 for Adam,
Lion and GaLore. These also move some value by more than ``STRAIGHT`` of the learning rates together."""

Names = Mapping[int, tuple[str, str]]
"""The name and the kind of each parameter, by its ``id``."""


def half_parameters(optimizer: Optimizer, names: Names) -> Iterator[tuple[int, str, str, Any]]:
    """Yield the half parameters with a dense gradient: the index of the group, the name, the kind and the parameter."""
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.dtype in HALVES and not parameter.is_meta and is_dense(parameter.grad):
                name, kind = names.get(id(parameter), (f"group {index}, parameter {place}", OTHERS))
                yield index, name, kind, parameter


@dataclass
class SampledValues:
    """Some values of a half parameter, with its name and its kind.

    Attributes:
        at_first: The values in the first sample.
        began: The optimizer's step count at the first sample; ``steps`` counts the steps since.
        rate: The sum of the learning rates until the first sample; ``rate_now`` is the sum until the last.
        latest: The values in the last sample.
        moved: True for changed values; ``driven`` counts finite nonzero gradients of each value in ``looks`` samples,
            and ``slopes`` adds up their magnitudes.
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
        self.latest, self.slopes = self.at_first, torch.zeros_like(self.at_first, dtype=torch.float32)
        self.looks, self.steps, self.rate_now = 0, 0, self.rate

    def look(self, now: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Compare a new sample with the first. ``state`` has samples of the optimizer's state for the parameter."""
        self.looks += 1
        self.latest = now.clone()
        self.moved |= now.view(torch.int16) != self.at_first.view(torch.int16)  # compare bits, so that NaN equals NaN
        self.driven += (gradient != 0) & gradient.isfinite()
        self.slopes += gradient.float().abs().nan_to_num(0.0, 0.0)
        for key, values in state.items():
            is_master = (values.to(now.dtype) == now).all() if values.dtype is torch.float32 else self.is_kept
            self.is_kept = self.is_kept | is_master | bool(MASTER_STATE_NAMES.search(key))

    @property
    def has_gradients(self) -> torch.Tensor:
        """True for values that had a gradient in half of the samples."""
        return 2 * self.driven >= self.looks

    @property
    def reach(self) -> torch.Tensor:
        """The learning rate of all steps together: how far a value goes if each step is as large as that."""
        return torch.full_like(self.slopes, float(self.rate_now - self.rate))

    @property
    def slope(self) -> torch.Tensor:
        """The mean magnitude of each value's gradient."""
        return self.slopes / self.looks

    def seen(self, factor: float | None) -> StillParameter:
        """Return how many values count, and how many have changed; both had a gradient in half of the samples.

        A value counts if the steps would have moved it by a unit in the last place. ``factor`` is that of SGD's law.
        """
        distance = self.reach if factor is None else self.reach * self.slope * factor
        unit = self.at_first.float().abs() * torch.finfo(self.at_first.dtype).eps
        counted = self.has_gradients & (unit <= distance)
        moved = self.moved & self.has_gradients
        return StillParameter(self.name, self.kind, int(counted.sum()), int(moved.sum()), self.steps)


def sgd_factor(sampled: Sequence[SampledValues]) -> float | None:
    """Return the factor of SGD's law if that fits the moved values clearly better, with a smaller spread.

    The other law moves a value by the learning rates of all steps at most. SGD's moves it by ``factor`` times these and
    the gradient.
    """
    ratios: list[torch.Tensor] = []
    for one in sampled:
        way = (one.latest.float() - one.at_first.float()).abs()
        of = (way > 0.0) & one.has_gradients & (one.reach > 0.0)
        ratios.append(torch.stack([way / one.reach, way / (one.reach * one.slope)])[:, of].log().cpu())
    found = torch.cat([torch.empty(2, 0), *ratios], dim=1)
    by_rate, by_gradient = found[:, found.isfinite().all(0)]
    if len(by_rate) < LEAST_VALUES or by_rate.max() > math.log(STRAIGHT):
        return None
    is_of_sgd = by_gradient.std() < FITS_BETTER * by_rate.std()
    return float(by_gradient.median().exp()) if is_of_sgd else None


class StillValues:
    """The sampled half parameters of one optimizer."""

    def __init__(self) -> None:
        self._sampled: dict[int, SampledValues] = {}
        self._rates: dict[int, Any] = {}
        self._steps = self._next = 0
        self._is_normalized = False

    def before(self, optimizer: Optimizer, names: Callable[[], Names]) -> None:
        """Sample the parameters at growing intervals; call this right before each step of the optimizer."""
        self._is_normalized = type(optimizer).__name__ in NORMALIZED
        if self._steps >= self._next:
            self._next = self._steps + max(1, self._steps // 4)
            self._look(optimizer, names())
        self._steps += 1
        for index, group in enumerate(optimizer.param_groups):  # d is D-adaptation's estimate
            self._rates[index] = self._rates.get(index, 0.0) + (group.get("lr") or 0.0) * group.get("d", 1.0)

    def _look(self, optimizer: Optimizer, names: Names) -> None:
        for group, name, kind, parameter in half_parameters(optimizer, names):
            now, state, rate = sample_of(parameter), optimizer.state.get(parameter, {}), self._rates.get(group, 0.0)
            if id(parameter) not in self._sampled:
                self._sampled[id(parameter)] = SampledValues(name, kind, now.clone(), self._steps, rate)
            sampled = self._sampled[id(parameter)]
            sampled.steps, sampled.rate_now = self._steps - sampled.began, rate
            alike = {key: one for key, one in state.items() if getattr(one, "shape", None) == parameter.shape}
            sampled.look(now, sample_of(parameter.grad), {key: sample_of(one) for key, one in alike.items()})

    @property
    def still(self) -> Iterator[StillParameter]:
        """The parameters with almost no changed values, in kinds with enough values that count."""
        factor = None if self._is_normalized else sgd_factor([*self._sampled.values()])
        old_enough = [one for one in self._sampled.values() if one.steps >= LEAST_STEPS]
        known = [one.seen(factor) for one in old_enough if not bool(one.is_kept)]
        still = [one for one in known if one.moved <= MOVED * one.entries]
        for kind in dict.fromkeys(one.kind for one in still):
            of_it = [one for one in still if one.kind == kind and one.entries]
            yield from of_it if sum(one.entries for one in of_it) >= LEAST_VALUES else ()

    @property
    def names(self) -> set[str]:
        """The names of the half parameters that have had a gradient."""
        return {one.name for one in self._sampled.values()}
