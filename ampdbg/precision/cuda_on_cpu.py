"""User code that says ``cuda``, run on a machine without a GPU: ``autocast("cuda")``, ``.cuda()``, GradScaler.

Without this torch disables such an autocast and such a scaler with a mere warning, and the run that is
watched is not the run that the user has.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.amp import autocast_mode, grad_scaler
from torch.utils import _device

from . import autocast_policy


@contextlib.contextmanager
def cuda_names_on_cpu() -> Iterator[None]:
    """While this is entered, torch's names for CUDA mean the CPU; a no-op for code that never says them."""
    with ExitStack() as stack:
        for owner, name, replace in _replacements():
            stack.enter_context(replaced(owner, name, replace(getattr(owner, name))))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute and puts back what was there; one that was inherited is deleted again."""
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


_MISSING = object()

Replacement = Callable[[Any], Any]


def _replacements() -> Iterator[tuple[Any, str, Replacement]]:
    """Every (owner, attribute, replacement of its value)."""
    yield autocast_mode.autocast, "__init__", _autocast_init
    yield grad_scaler.GradScaler, "__init__", _scaler_init
    yield autocast_mode, "_cast", _device_named("device_type")
    yield torch, "clear_autocast_cache", _also_clearing_ours
    for name in _AUTOCAST_STATE:
        yield torch, name, _device_first
    for name in _AUTOCAST_STATE_OF_CUDA:
        if hasattr(torch, name):
            yield torch, name, functools.partial(_named_for_cuda, _AUTOCAST_STATE_OF_CUDA[name])
    for owner in (torch.Tensor, torch.nn.Module):
        yield owner, "cuda", _stays
    yield torch.Tensor, "to", _any_device
    yield torch.nn.Module, "to", _any_device
    for name in _TENSOR_FACTORIES:
        yield torch.Tensor, name, _any_device
    for function in sorted(_device._device_constructors(), key=lambda function: str(function.__name__)):
        name = function.__name__
        if getattr(torch, name, None) is function:
            yield torch, name, _any_device
    for name in _HARMLESS_ON_CPU:
        yield torch.cuda, name, lambda original: _does_nothing


_AUTOCAST_STATE = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
_AUTOCAST_STATE_OF_CUDA = {
    "get_autocast_gpu_dtype": "get_autocast_dtype",
    "set_autocast_gpu_dtype": "set_autocast_dtype",
}
_TENSOR_FACTORIES = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
_HARMLESS_ON_CPU = ("synchronize", "set_device", "reset_peak_memory_stats")


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def _on_cpu(value: Any) -> Any:
    if not _is_cuda(value):
        return value
    return "cpu" if isinstance(value, str) else torch.device("cpu")


def _autocast_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            # CUDA's default is float16, the CPU's bfloat16: the user means CUDA's.
            device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _scaler_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, _on_cpu(device), *args, **kwargs)

    return __init__


def _device_named(parameter: str) -> Replacement:
    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        position = list(inspect.signature(original).parameters).index(parameter)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(_on_cpu(value) if i == position else value for i, value in enumerate(args))
            return original(*args, **{key: _on_cpu(value) if key == parameter else value for key, value in kwargs.items()})

        return call

    return replace


def _device_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """The autocast state of a device named first; without a device torch means CUDA's, so the CPU's here."""

    @functools.wraps(original)
    def call(*args: Any) -> Any:
        if not args or not isinstance(args[0], str):
            return original("cpu", *args)
        return original(_on_cpu(args[0]), *args[1:])

    return call


def _named_for_cuda(name: str, _original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(getattr(torch, name), "cpu")


def _also_clearing_ours(original: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        original()
        autocast_policy.clear_weight_cache()

    return clear_autocast_cache


def _stays(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return cuda


def _any_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        # tensor.to("cuda") and module.to("cuda"): the device is the first argument behind self.
        if len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return original(*args, **kwargs)

    return call


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    return None
