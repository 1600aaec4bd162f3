"""Widen the dtypes that a step uses, or round its tensors to half. Both are undone afterwards.

Autocast's own casts are widened too, so an autocast region in the user's code has no effect.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Wider = Mapping[torch.dtype, torch.dtype]
"""Maps dtypes to their replacements. Other dtypes do not change."""

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
"""The replacements for a replay in each dtype. For a half dtype, they replace the other half dtype."""


class _Lifting(TorchDispatchMode):
    def __init__(self, wider: Wider, excepted: Container[int]) -> None:
        super().__init__()
        self._wider, self._excepted = wider, excepted

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Casts and new tensors take their dtype as a keyword only; view.dtype takes it by position.
        kwargs = kwargs or {}
        wider = self._wider.get(kwargs["dtype"]) if kwargs.get("dtype") else None
        if wider and (node := torch._C._current_autograd_node()) is not None:
            wider = None if node._sequence_nr() in self._excepted else wider
        return op(*args, **({**kwargs, "dtype": wider} if wider else kwargs))


@contextlib.contextmanager
def lifted(dtype: str, excepted: Container[int] = ()) -> Iterator[None]:
    """Inside this context, no op creates a tensor of a narrower floating-point dtype than ``dtype``. Only the
    ``excepted`` autograd nodes do, given by their sequence numbers."""
    default = torch.get_default_dtype()
    with _Lifting(LIFTS[dtype], excepted):
        try:
            torch.set_default_dtype(LIFTS[dtype].get(default, default))
            yield
        finally:
            torch.set_default_dtype(default)


DTYPE_OF = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
"""The function that returns the dtype of a tensor."""


class HalfClaims(TorchFunctionMode):
    """Lets a step that takes only half tensors, as FlashAttention does, run in a wider dtype. Its tensors claim to have
    the ``claimed`` half dtype instead of their ``own``. A call that raises an error is repeated in that half dtype."""

    def __init__(self, claimed: torch.dtype, own: torch.dtype) -> None:
        super().__init__()
        self._claimed, self._own = claimed, own
        self.in_half = set[int]()
        """The sequence numbers of the autograd nodes of such calls, whose backward passes are in half too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(function, args, kwargs or {})
        if result is not self._own or function != DTYPE_OF:
            return result
        reader = sys._getframe(1).f_globals.get("__name__", "")
        return result if reader.startswith("torch.") else self._claimed  # a checkpoint compares dtypes

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch function, or the ``apply`` of an ``autograd.Function``."""
        try:
            return function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AssertionError):
            if getattr(function, "__name__", "") in ("backward", "grad"):  # a graph is gone after its first pass
                raise
        args, kwargs = _exactly((args, kwargs), self._own, self._claimed)
        with _disable_current_modes():
            result = function(*args, **kwargs)
        nodes = (one.grad_fn for one in _pytree.tree_leaves(result) if isinstance(one, torch.Tensor))
        self.in_half |= {node._sequence_nr() for node in nodes if node is not None}
        return _exactly(result, self._claimed, self._own)


class _ExactCast(torch.autograd.Function):
    """Casts a tensor, and its gradient back, where all other casts to half are widened."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        with _disable_current_modes():
            return tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with _disable_current_modes():
            return gradients[0].to(ctx.dtype), None


def _exactly(value: Any, dtype: torch.dtype, other: torch.dtype) -> Any:
    """Cast each tensor of one dtype in a value to another."""
    with torch._C.DisableTorchFunction():
        return _pytree.tree_map_only(
            torch.Tensor, lambda tensor: _ExactCast.apply(tensor, other) if tensor.dtype is dtype else tensor, value
        )


Alteration = Callable[[torch.Tensor], torch.Tensor]


def widened(tensor: torch.Tensor, wider: Wider) -> torch.Tensor:
    """Return the tensor in its replacement dtype in ``wider``, or the tensor itself if there is none."""
    return tensor.to(wider[tensor.dtype]) if tensor.dtype in wider else tensor


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in a value to ``dtype``, such as a module's inputs or output."""
    return _pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


def widen(tensor: torch.Tensor, wider: Wider) -> None:
    """Permanently convert a leaf and its gradient to their replacement dtypes in ``wider``."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = widened(tensor.data, wider)
    tensor.grad = None if gradient is None else widened(gradient, wider)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round floating-point values to ``dtype`` but keep the tensor's dtype. Values out of range do not change."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return tensor
    return torch.where(tensor.abs() <= torch.finfo(dtype).max, tensor.to(dtype).to(tensor.dtype), tensor)


def spread(tensor: torch.Tensor, dtype: torch.dtype, draw: int) -> torch.Tensor:
    """Perturb each floating-point value at random by at most half an ``eps`` of ``dtype``, as rounding does.

    Values that ``dtype`` represents exactly are perturbed too: the step's results are rounded. Half becomes float32.
    """
    if not tensor.is_floating_point() or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(draw)
    share = torch.rand(tensor.shape, generator=generator, device=tensor.device) - 0.5
    return widened(tensor, LIFTS["float32"]) * (1.0 + share * torch.finfo(dtype).eps)


@contextlib.contextmanager
def altered(tensors: Iterable[torch.Tensor], alter: Alteration) -> Iterator[None]:
    """Alter the tensors in place without their gradients. On exit, restore the original memory and gradients.

    Gradients computed inside the context are dropped, because they do not fit the restored tensors.
    """
    kept = [(tensor, tensor.data, tensor.grad if tensor.is_leaf else None) for tensor in tensors]
    try:
        for tensor, data, _ in kept:
            tensor.grad = None
            other = alter(data)
            if other is not data:
                tensor.data = other
        yield
    finally:
        for tensor, data, gradient in kept:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient
