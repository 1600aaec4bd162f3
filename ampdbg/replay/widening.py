"""A model and its batches as another precision would hold them: wider, or rounded to half; undone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.precision.lifting import Wider
from ampdbg.replay.held import tensors_in

Alteration = Callable[[torch.Tensor], torch.Tensor]


def widening(wider: Wider) -> Alteration:
    """Tensors of a dtype in ``wider`` become what it says; others are returned as they are."""
    return lambda tensor: tensor.to(wider[tensor.dtype]) if tensor.dtype in wider else tensor


def rounding_to(dtype: torch.dtype) -> Alteration:
    """Floating-point values are rounded to ``dtype`` and kept in their own; what it cannot hold stays."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        return torch.where(tensor.abs() <= torch.finfo(dtype).max, tensor.to(dtype).to(tensor.dtype), tensor)

    return rounded


def altered_model(model: torch.nn.Module, alter: Alteration) -> contextlib.AbstractContextManager[None]:
    """The model's parameters, its buffers and the tensors among its modules' attributes altered: see ``altered``."""
    return altered(tensors_in(model), alter)


@contextlib.contextmanager
def altered(tensors: Iterable[torch.Tensor], alter: Alteration) -> Iterator[None]:
    """The tensors altered in place; afterwards they hold the very same memory again.

    Gradients made inside do not fit what the tensors are afterwards, and are cleared.
    """
    kept = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in kept:
            other = alter(data)
            if other is not data:
                tensor.data = other
        yield
    finally:
        for tensor, data in kept:
            if tensor.is_leaf:
                tensor.grad = None
            tensor.data = data


def altered_batch(batch: Any, alter: Alteration) -> Any:
    """The batch with its tensors altered; the one that was given is left as it is."""
    return _pytree.tree_map_only(torch.Tensor, alter, batch)
