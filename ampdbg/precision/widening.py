"""Code and tensors in wider formats than a step asks for, or rounded to half; undone afterwards.

Autocast's own casts are lifted too, so a region that the user's code enters has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

Wider = Mapping[torch.dtype, torch.dtype]
"""What each dtype becomes; those that are not in it stay."""

LIFTS: Mapping[str, Wider] = {
    "float16": {torch.bfloat16: torch.float16},
    "bfloat16": {torch.float16: torch.bfloat16},
    "float32": {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.complex32: torch.complex64,
    },
    "float64": {
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.float32: torch.float64,
        torch.complex32: torch.complex128,
        torch.complex64: torch.complex128,
    },
}
"""The lift for a replay of each dtype; each half takes the place of the other."""


class _Lifting(TorchDispatchMode):
    def __init__(self, wider: Wider) -> None:
        super().__init__()
        self._wider = wider

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A dtype is keyword-only wherever a cast or a new tensor is meant; view.dtype takes it by position.
        kwargs = kwargs or {}
        wider = self._wider.get(kwargs["dtype"]) if kwargs.get("dtype") else None
        return op(*args, **({**kwargs, "dtype": wider} if wider else kwargs))


@contextlib.contextmanager
def lifted(dtype: str) -> Iterator[None]:
    """While this is entered, no op makes a tensor of a narrower floating-point dtype than ``dtype``."""
    default = torch.get_default_dtype()
    with _Lifting(LIFTS[dtype]):
        try:
            torch.set_default_dtype(LIFTS[dtype].get(default, default))
            yield
        finally:
            torch.set_default_dtype(default)


Alteration = Callable[[torch.Tensor], torch.Tensor]


def widened(tensor: torch.Tensor, wider: Wider) -> torch.Tensor:
    """The tensor in the dtype that ``wider`` has for its own; itself where it has none."""
    return tensor.to(wider[tensor.dtype]) if tensor.dtype in wider else tensor


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in a value, such as a module's inputs or output, in that dtype."""
    return _pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


def widen(tensor: torch.Tensor, wider: Wider) -> None:
    """Gives a leaf, and its gradient, memory in the dtype that ``wider`` has for its own; for good."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = widened(tensor.data, wider)
    tensor.grad = None if gradient is None else widened(gradient, wider)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floating-point values rounded to ``dtype`` and kept in their own; what it cannot hold stays."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return tensor
    return torch.where(tensor.abs() <= torch.finfo(dtype).max, tensor.to(dtype).to(tensor.dtype), tensor)


def spread(tensor: torch.Tensor, dtype: torch.dtype, draw: int) -> torch.Tensor:
    """Floating-point values moved at random, each by half an ``eps`` of ``dtype`` at most: as far as rounding moves it.

    A value that ``dtype`` holds is moved too: what a step computes with it is rounded. One in half becomes float32.
    """
    if not tensor.is_floating_point() or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(draw)
    share = torch.rand(tensor.shape, generator=generator, device=tensor.device) - 0.5
    return widened(tensor, LIFTS["float32"]) * (1.0 + share * torch.finfo(dtype).eps)


@contextlib.contextmanager
def altered(tensors: Iterable[torch.Tensor], alter: Alteration) -> Iterator[None]:
    """The tensors altered in place, without their gradients; afterwards they hold the very same memory and those again.

    Gradients made inside do not fit what the tensors are afterwards.
    """
    kept = [(tensor, tensor.data, tensor.grad if tensor.is_leaf else None) for tensor in tensors]
    try:
        for tensor, data, _ in kept:
            if tensor.is_leaf:
                tensor.grad = None
            other = alter(data)
            if other is not data:
                tensor.data = other
        yield
    finally:
        for tensor, data, gradient in kept:
            if tensor.is_leaf:
                tensor.grad = None
            tensor.data = data
            if tensor.is_leaf:
                tensor.grad = gradient
