"""CUDA's mixed precision on a machine without a GPU: its op lists, its rounding, its names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack

from ampdbg.precision.cuda_names import cuda_names_on_cpu

from .autocast_policy import cuda_autocast_policy
from .half_kernels import half_kernels

_entered: list[ExitStack] = []
"""One entry for each context that is entered now; the first one holds the emulation."""


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """While this is entered, autocast on CPU tensors is CUDA's: its op lists, FP32 accumulation with one
    rounding, its weight cache, and ``autocast("cuda")``, ``GradScaler()`` and ``.cuda()`` that work.

    May be nested; the outermost exit undoes everything, also when the code inside raises.
    """
    with ExitStack() as stack:
        if not _entered:
            for part in (half_kernels, cuda_autocast_policy, cuda_names_on_cpu):
                stack.enter_context(part())
        _entered.append(stack)
        stack.callback(_entered.pop)
        yield


def is_emulating() -> bool:
    """Whether :func:`cuda_on_cpu` is entered now."""
    return bool(_entered)
