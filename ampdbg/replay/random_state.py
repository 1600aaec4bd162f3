"""The random state of the process: of Python, NumPy, torch and its GPUs."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


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
