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
        """The state at this moment."""
        return RandomState(**{name: read() for name, read in READ.items()})

    def others(self, other: RandomState) -> set[str]:
        """The names of the parts that are not as in another state."""
        with _disable_current_modes():  # a mode of the user's is to see nothing of it
            before = _plain(other)
            return {name for name, part in _plain(self).items() if part != before[name]}

    def restore(self) -> None:
        """Makes this the state of the process."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))


def _plain(state: RandomState) -> dict[str, object]:
    """Its parts by name, as what can be compared."""
    cpu, *devices = (part.numpy().tobytes() for part in (state.cpu, *state.devices))
    return {"python": state.python, "numpy": pickle.dumps(state.numpy), "cpu": cpu, "devices": devices}


READ: Mapping[str, Callable[[], Any]] = {
    "python": random.getstate,
    "numpy": numpy.random.get_state,
    "cpu": torch.get_rng_state,
    "devices": lambda: tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else (),
}
"""What reads each part of a random state."""

LOOKED_AT = 17
"""Of the calls of a loop that draw no random numbers so many are looked at, and later one in so many: reading the
states takes as long as all else that is noted of a call. A prime number, as loops call their modules in turn."""


class RandomStates:
    """The random state before each call of a loop, read only where a call was seen to draw from it."""

    def __init__(self) -> None:
        self.latest = RandomState.now()
        """That before the last call; of a generator that no call has drawn from, one of earlier."""
        self._calls = 0
        self._drawn: set[str] = set()
        """Of which generators: fields of a random state."""

    @property
    def _is_looked_at(self) -> bool:
        return self._calls <= LOOKED_AT or self._calls % LOOKED_AT == 0

    def before_a_call(self) -> RandomState:
        """The state of now, as far as calls draw from it."""
        self._calls += 1
        wanted = READ if self._is_looked_at else self._drawn
        if wanted:
            self.latest = replace(self.latest, **{name: READ[name]() for name in wanted})
        return self.latest

    def after_a_call(self) -> None:
        """To be called when the call has returned: now and then it is looked at what it has drawn from."""
        if self._is_looked_at:
            self._drawn |= RandomState.now().others(self.latest)


@contextlib.contextmanager
def kept_random_state() -> Iterator[RandomState]:
    """Afterwards the process has the random state that it has now."""
    before = RandomState.now()
    try:
        yield before
    finally:
        before.restore()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds Python, torch and NumPy; afterwards each has the state it had before."""
    with kept_random_state():
        random.seed(seed)
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        yield
