"""How large a batch fits: the batch of a config is doubled, and what a pass keeps is counted again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ampdbg.errors import AmpdbgError, first_line
from ampdbg.record.cost import BatchFit
from ampdbg.replay.copies import altered_batch
from ampdbg.workload.batches import tensor_leaves

MOST_TIMES = 16
"""Where memory does not grow in proportion, no larger batch is tried."""

MOST_DOUBLINGS = 20

IN_PROPORTION = 0.01
"""Two doublings whose growth agrees within this share are taken to go on so."""


def shared_dimension(batch: Any) -> tuple[int, int] | None:
    """The first dimension in which all tensors of a batch are of one size, and that size; None where there is none."""
    leaves = [leaf for _, leaf in tensor_leaves(batch)]
    if any(leaf.is_nested for leaf in leaves):  # their sizes are several
        return None
    shapes = [leaf.shape for leaf in leaves if leaf.ndim]
    sizes = [set(each) for each in zip(*shapes, strict=False)]
    return next(((d, int(*each)) for d, each in enumerate(sizes) if len(each) == 1), None)


def enlarged(batch: Any, times: int, dimension: int) -> Any:
    """The batch so many times over along the dimension; numbers stay as they are."""
    return altered_batch(batch, lambda leaf: torch.cat([leaf] * times, dimension) if leaf.ndim else leaf)


def largest_batch(batch: Any, room: int, activations: int, activations_of: Callable[[Any], int]) -> BatchFit:
    """How many times the batch fits, by doubling: measured until it grows in proportion, and reckoned from there on.

    Args:
        batch: a batch of the config.
        room: bytes that its activations may take.
        activations: bytes that those of the batch itself take.
        activations_of: those of another batch.
    """
    shared, measured = shared_dimension(batch), [activations]
    while measured[-1] <= room:
        times = 2 ** (len(measured) - 1)
        if shared is None:
            return BatchFit(times, tuple(measured), why="its tensors share no dimension that could be doubled")
        if _in_proportion(measured):
            each = (measured[-1] - measured[-2]) * 2 / times
            fitting = (2**n for n in range(MOST_DOUBLINGS + 1) if activations + each * (2**n - 1) <= room)
            return BatchFit(max(fitting), tuple(measured), is_reckoned=True)
        if times == MOST_TIMES:
            return BatchFit(times, tuple(measured), why="memory does not grow in proportion, and no more was tried")
        try:
            larger = enlarged(batch, 2 * times, shared[0])
        except Exception as error:  # noqa: BLE001 - a tensor's class, or a device's allocator
            return BatchFit(times, tuple(measured), why=f"torch cannot double the batch: {first_line(error)}")
        try:
            measured.append(activations_of(larger))
        except AmpdbgError as error:
            return BatchFit(times, tuple(measured), why=f"{2 * times} times: {first_line(error)}")
    return BatchFit(2 ** (len(measured) - 1) // 2, tuple(measured))


def _in_proportion(measured: Sequence[int]) -> bool:
    one, two, four = measured[-3:] if len(measured) > 2 else (0, 0, 0)
    return two > one and math.isclose(four - two, 2 * (two - one), rel_tol=IN_PROPORTION)
