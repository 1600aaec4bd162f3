"""CUDA's mixed precision on a machine without a GPU: CUDA's op lists, its rounding and its Python API.

Without the emulation, torch merely warns and disables ``autocast("cuda")`` and CUDA's GradScaler. ampdbg would
then observe a run that differs from the user's run on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.amp import autocast_mode, grad_scaler
from torch.jit import _builtins
from torch.utils import _device

from ampdbg.precision.autocast_policy import cuda_autocast_policy, weight_casts
from ampdbg.precision.half_kernels import half_kernels, half_transforms

_entered: list[ExitStack] = []
"""The exit stack of each active :func:`cuda_on_cpu` context. The first entry holds the emulation."""


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Make mixed precision on CPU tensors behave as on CUDA inside this context.

    Autocast uses CUDA's op lists and weight cache. Half kernels accumulate in FP32 and round once.
    ``autocast("cuda")``, ``GradScaler()`` and ``.cuda()`` work. Contexts may be nested.
    The outermost exit undoes everything, even after an exception.
    """
    with ExitStack() as stack:
        if not _entered:
            for part in (half_kernels, half_transforms, cuda_autocast_policy, cuda_names_on_cpu):
                stack.enter_context(part())
        _entered.append(stack)
        stack.callback(_entered.pop)
        yield


def is_emulating() -> bool:
    """True while :func:`cuda_on_cpu` is active."""
    return bool(_entered)


@contextlib.contextmanager
def cuda_names_on_cpu() -> Iterator[None]:
    """Redirect torch's CUDA names to the CPU inside this context. Code that never uses them is unaffected."""
    # The first optimizer makes torch look up and cache its own functions by name: do that before replacing any.
    torch.optim.SGD([torch.zeros(1)])
    with ExitStack() as stack:
        # Give the CPU CUDA's default autocast dtype. The default is per thread.
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", torch.float16)
        for owner, name, replace in _replacements():
            original = getattr(owner, name, None)
            if original is None:  # another version of torch
                continue
            replacement = replace(original)
            # TorchScript finds torch's functions in a table of ids (torch/jit/_builtins.py), built on first use.
            # Build it before any replacement: TorchScript compiles the source of functions that the table lacks.
            if op := _builtins._find_builtin(original):
                _builtins._register_builtin(replacement, op)
                # A later object may reuse the id of this replacement.
                stack.callback(_builtins._get_builtin_table().pop, id(replacement))
            stack.enter_context(patch.object(owner, name, replacement))
        yield


Replacement = Callable[[Any], Any]


def _replacements() -> Iterator[tuple[Any, str, Replacement]]:
    """Yield each replacement as (owner, attribute name, function from the old value to the new one)."""
    # A GradScaler without a device argument defaults to CUDA.
    yield grad_scaler.GradScaler.__init__, "__defaults__", lambda original: ("cpu", *original[1:])
    yield from ((owner, "__init__", _any_device) for owner in (autocast_mode.autocast, grad_scaler.GradScaler))
    yield autocast_mode, "_cast", _any_device
    yield torch, "load", _any_device
    yield torch, "clear_autocast_cache", _also_clearing_ours
    yield torch, "get_autocast_dtype", _dtype_lowered_to
    yield torch, "get_autocast_gpu_dtype", lambda original: lambda: torch.get_autocast_dtype("cuda")
    yield torch, "set_autocast_gpu_dtype", lambda original: lambda dtype: torch.set_autocast_dtype("cuda", dtype)
    yield from ((torch, name, _device_first) for name in _AUTOCAST_STATE)
    yield from ((owner, "cuda", _returns_self) for owner in _MOVABLE)
    yield from ((owner, "to", functools.partial(_any_device, second=_device_on_cpu)) for owner in _MOVABLE)
    yield torch.Tensor, "pin_memory", _returns_self
    yield torch.Tensor, "record_stream", _returns_self
    yield torch.Tensor, "type", _tensor_type_named
    yield torch, "set_default_tensor_type", _tensor_type_named
    yield torch, "Generator", returning(Generator)
    yield from ((torch.Tensor, name, _any_device) for name in _TENSOR_FACTORIES)
    yield from ((torch, name, _any_device) for name in (*_factories_of_torch(), *_FACTORIES_BY_EXAMPLE))
    # torch.set_default_device("cuda") and `with torch.device("cuda")`
    yield _device.DeviceContext, "__init__", _any_device
    yield torch.nn.Module, "to_empty", _any_device
    # Without a GPU, nn.DataParallel calls its module directly.
    yield sys.modules[torch.nn.DataParallel.__module__], "_get_available_device_type", lambda original: returning(None)
    for module, values in ((torch.cuda, RUNTIME), (torch.cuda.nvtx, NVTX)):
        yield from ((module, name, returning(value)) for name, value in values.items())


def _factories_of_torch() -> list[str]:
    """Return the names of ``torch.zeros`` and all other torch functions that take a device."""
    constructors = {function.__name__: function for function in _device._device_constructors()}
    return sorted(name for name, function in constructors.items() if getattr(torch, name, None) is function)


_AUTOCAST_STATE = ("is_autocast_enabled", "set_autocast_enabled", "set_autocast_dtype")
_DEVICES = ("device", "device_type", "map_location")
_MOVABLE = (torch.Tensor, torch.nn.Module)
_TENSOR_FACTORIES = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
_FACTORIES_BY_EXAMPLE = tuple(name for name in dir(torch) if name.endswith("_like"))


def _cuda_to_cpu(value: Any) -> Any:
    """Replace a CUDA device, or its name, with the CPU. Return any other value unchanged."""
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _device_on_cpu(device: Any) -> Any:
    """Like :func:`_cuda_to_cpu`, for positions that only take a device: a bare integer there is a GPU index."""
    return "cpu" if type(device) is int else _cuda_to_cpu(device)


def _device_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a getter or setter of autocast state. Its first argument is the device; CUDA by default, so the CPU here."""

    @functools.wraps(original)
    def call(*args: Any) -> Any:
        if not args or not isinstance(args[0], str):
            return original("cpu", *args)
        return original(_cuda_to_cpu(args[0]), *args[1:])

    return call


def _dtype_lowered_to(original: Callable[[str], torch.dtype]) -> Callable[[str], torch.dtype]:
    """Wrap the getter: return the region's dtype, or outside of a region CUDA's default, even in newer threads."""
    entered_in = threading.get_ident()

    @functools.wraps(original)
    def get_autocast_dtype(device_type: str) -> torch.dtype:
        dtype = original(_cuda_to_cpu(device_type))
        says_so = _cuda_to_cpu(device_type) != "cpu" or threading.get_ident() == entered_in
        return dtype if says_so or torch.is_autocast_enabled("cpu") else torch.float16

    return get_autocast_dtype


def _also_clearing_ours(original: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        original()
        weight_casts.clear()

    return clear_autocast_cache


def _returns_self(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return cuda


def _any_device(original: Callable[..., Any], second: Callable[[Any], Any] = _cuda_to_cpu) -> Callable[..., Any]:
    """Wrap a function that takes its device as the second argument, or by a name in ``_DEVICES``."""

    # functools.wraps matters: TorchScript compiles the wrapped source, and torch.compile reads its signature.
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in _DEVICES:
            if name in kwargs:
                kwargs[name] = _device_on_cpu(kwargs[name])
        # Pinned memory serves copies to a GPU, and without a GPU torch cannot allocate it.
        kwargs.pop("pin_memory", None)
        return original(*args[:1], *map(second, args[1:2]), *args[2:], **kwargs)

    return call


def _tensor_type_named(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value for value in args)
        return original(*args, **kwargs)

    return call


def returning(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value`` for any arguments."""
    return lambda *args, **kwargs: value


class Stream:
    """Replaces ``torch.cuda.Stream``. All work runs synchronously, so every query reports completion."""

    device = torch.device("cpu")
    synchronize = wait_stream = wait_event = staticmethod(returning(None))
    query = staticmethod(returning(True))
    is_capturing = staticmethod(returning(False))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept and ignore the arguments of a CUDA stream: a device and a priority."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    """Replaces ``torch.cuda.Event``: records a time on the CPU's clock."""

    synchronize = wait = staticmethod(returning(None))
    query = staticmethod(returning(True))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept and ignore the arguments of a CUDA event, such as ``enable_timing``."""
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return (end_event._seconds - self._seconds) * 1e3


class _OnAnyDevice(type):
    """Makes torch's own generators pass ``isinstance``, which a subclass of ``torch.Generator`` could not do."""

    def __call__(cls, device: Any = "cpu") -> torch._C.Generator:
        return torch._C.Generator("cpu")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(metaclass=_OnAnyDevice):
    """Replaces ``torch.Generator``: creates a CPU generator for any device."""


TENSOR_TYPES = tuple(
    f"{kind}Tensor" for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)

RUNTIME: Mapping[str, Any] = {
    **{name: getattr(torch, name) for name in TENSOR_TYPES},
    "Event": Event,
    "Stream": Stream,
    "current_device": returning(0),
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    "initial_seed": functools.partial(torch.initial_seed),
    "memory_reserved": returning(0),
    "max_memory_reserved": returning(0),
    "memory_summary": returning(""),
    "memory_snapshot": returning(()),
    # Called by `with torch.cuda.device(0)`; -1 means that there is no previous device to restore.
    "_exchange_device": returning(-1),
    "_maybe_exchange_device": returning(-1),
    **{name: returning(None) for name in ("init", "synchronize", "set_device", "set_stream")},
    **{name: returning(None) for name in ("set_per_process_memory_fraction", "reset_peak_memory_stats")},
    "reset_max_memory_allocated": returning(None),
}
"""Replacement values for attributes of ``torch.cuda`` on a CPU.

``is_available`` is not among them: code that checks it takes its CPU branch. Each name has its own function object,
because torch.compile rejects one function under two names that it treats differently.
"""

NVTX: Mapping[str, Any] = {name: returning(None) for name in ("range_push", "range_pop", "mark")}
"""The same for ``torch.cuda.nvtx``; its ``range`` calls these functions."""
