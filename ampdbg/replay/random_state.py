"""The random state of the process: of Python, NumPy, torch and its GPUs."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import numpy.random
import torch
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class RandomState:
    """The random state of Python, NumPy, torch and its GPUs."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]

    @staticmethod
    def now() -> RandomState:
        """Return the current random state."""
        return RandomState(**{name: read() for name, read in READ.items()})

    def others(self, other: RandomState) -> set[str]:
        """Return the names of the parts that differ from another state."""
        with _disable_current_modes():  # the user's modes must not see these ops
            before = _plain(other)
            return {name for name, part in _plain(self).items() if part != before[name]}

    def restore(self) -> None:
        """Make this the state of the process."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))


def _plain(state: RandomState) -> dict[str, object]:
    """Return the parts by name, in a form that can be compared."""
    cpu, *devices = (part.numpy().tobytes() for part in (state.cpu, *state.devices))
    return {"python": state.python, "numpy": pickle.dumps(state.numpy), "cpu": cpu, "devices": devices}


READ: Mapping[str, Callable[[], Any]] = {
    "python": random.getstate,
    "numpy": numpy.random.get_state,
    "cpu": torch.get_rng_state,
    "devices": lambda: tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else (),
}
"""Functions that read each part of a random state."""

SAMPLING_PERIOD = 17
"""This many first calls of a loop are checked for draws, and later one call in this many. Reading the states takes as
long as the rest of recording a call. The number is prime, because loops call their modules in turn."""


class RandomStates:
    """The random state before each call of a loop, read only for generators that calls are known to draw from."""

    def __init__(self) -> None:
        self.latest = RandomState.now()
        """The state before the last call; earlier for a generator that no call has drawn from."""
        self._calls = 0
        self._drawn: set[str] = set()
        """The generators that calls drew from: fields of a random state."""

    @property
    def _is_looked_at(self) -> bool:
        return self._calls <= SAMPLING_PERIOD or self._calls % SAMPLING_PERIOD == 0

    def before_a_call(self) -> RandomState:
        """Return the current state of the generators that calls draw from."""
        self._calls += 1
        wanted = READ if self._is_looked_at else self._drawn
        if wanted:
            self.latest = replace(self.latest, **{name: READ[name]() for name in wanted})
        return self.latest

    def after_a_call(self) -> None:
        """Check a returned call now and then for the generators that it drew from."""
        if self._is_looked_at:
            self._drawn |= RandomState.now().others(self.latest)


@contextlib.contextmanager
def kept_random_state() -> Iterator[RandomState]:
    """Restore the current random state on exit."""
    before = RandomState.now()
    try:
        yield before
    finally:
        before.restore()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, torch and NumPy; restore their states on exit."""
    with kept_random_state():
        random.seed(seed)
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        yield
