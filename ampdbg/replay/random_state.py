"""The random state of the process: of Python, NumPy, torch and its GPUs."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


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
        return RandomState(random.getstate(), numpy and numpy.random.get_state(), torch.get_rng_state(), _of_devices())

    def restore(self) -> None:
        """Makes this the state of the process."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))


LOOKED_AT = 17
"""Of the calls of a loop that draw no random numbers so many are looked at, and later one in so many: reading the
states takes as long as all else that is noted of a call. A prime number, as loops call their modules in turn."""


class RandomStates:
    """The random state before each call of a loop, read only where a call was seen to draw from it."""

    def __init__(self) -> None:
        self.latest = RandomState.now()
        """That before the last call; of a generator that no call has drawn from, one of earlier."""
        self._calls = 0
        self._is_looked_at = False
        self._draws = {"python": False, "numpy": False, "torch": False}

    def before_a_call(self) -> RandomState:
        """The state of now, as far as calls draw from it."""
        self._calls += 1
        self._is_looked_at = self._calls <= LOOKED_AT or self._calls % LOOKED_AT == 0
        if self._is_looked_at or any(self._draws.values()):
            self.latest = self._now()
        return self.latest

    def after_a_call(self) -> None:
        """To be called when the call has returned: now and then it is looked at what it has drawn from."""
        if self._is_looked_at:
            now, before = self._now(), self.latest
            self._draws["python"] |= now.python != before.python
            self._draws["numpy"] |= _of_numpy(now) != _of_numpy(before)
            self._draws["torch"] |= not _are_equal((now.cpu, *now.devices), (before.cpu, *before.devices))

    def _now(self) -> RandomState:
        looks, draws, before = self._is_looked_at, self._draws, self.latest
        numpy = sys.modules.get("numpy")
        is_torch = looks or draws["torch"]
        return RandomState(
            random.getstate() if looks or draws["python"] else before.python,
            numpy.random.get_state() if numpy is not None and (looks or draws["numpy"]) else before.numpy,
            torch.get_rng_state() if is_torch else before.cpu,
            _of_devices() if is_torch else before.devices,
        )


def _of_numpy(state: RandomState) -> object:
    return state.numpy and (state.numpy[1].tobytes(), *state.numpy[2:])


def _of_devices() -> tuple[torch.Tensor, ...]:
    return tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    with _disable_current_modes():  # a mode of the user's is to see nothing of it
        return len(some) == len(others) and all(map(torch.equal, some, others))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds Python, torch and (where it is in use) NumPy; afterwards each has the state it had before."""
    before = RandomState.now()
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    try:
        yield
    finally:
        before.restore()
