"""CUDA's mixed precision on a machine without a GPU: its op lists, its rounding, and code that says ``cuda``.

Without this torch disables such an autocast and such a scaler with a mere warning, and the run that is
watched is not the run that the user has.
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
"""One entry for each context that is entered now; the first one holds the emulation."""


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """While this is entered, autocast on CPU tensors is CUDA's: its op lists, FP32 accumulation with one
    rounding, its weight cache, and ``autocast("cuda")``, ``GradScaler()`` and ``.cuda()`` that work.

    May be nested; the outermost exit undoes everything, also when the code inside raises.
    """
    with ExitStack() as stack:
        if not _entered:
            for part in (half_kernels, half_transforms, cuda_autocast_policy, cuda_names_on_cpu):
                stack.enter_context(part())
        _entered.append(stack)
        stack.callback(_entered.pop)
        yield


def is_emulating() -> bool:
    """:func:`cuda_on_cpu` is entered now."""
    return bool(_entered)


@contextlib.contextmanager
def cuda_names_on_cpu() -> Iterator[None]:
    """While this is entered, torch's names for CUDA mean the CPU; a no-op for code that never says them."""
    # The first optimizer makes torch look up its own functions by name, once and for good: before we rename any.
    torch.optim.SGD([torch.zeros(1)])
    with ExitStack() as stack:
        # Autocast's default on the CPU is that of CUDA. It is a state of each thread.
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", torch.float16)
        for owner, name, replace in _replacements():
            original = getattr(owner, name, None)
            if original is None:  # another version of torch
                continue
            replacement = replace(original)
            # TorchScript knows torch's functions by a table of their ids (torch/jit/_builtins.py), made at the first
            # look: here, before anything is replaced. It would go into the source of any other function.
            if op := _builtins._find_builtin(original):
                _builtins._register_builtin(replacement, op)
                # Another object may be given the id of this one.
                stack.callback(_builtins._get_builtin_table().pop, id(replacement))
            stack.enter_context(patch.object(owner, name, replacement))
        yield


Replacement = Callable[[Any], Any]


def _replacements() -> Iterator[tuple[Any, str, Replacement]]:
    """Every (owner, attribute, replacement of its value)."""
    # A scaler that is given no device is one of CUDA's.
    yield grad_scaler.GradScaler.__init__, "__defaults__", lambda original: ("cpu", *original[1:])
    yield from ((owner, "__init__", _any_device) for owner in (autocast_mode.autocast, grad_scaler.GradScaler))
    yield autocast_mode, "_cast", _any_device
    yield torch, "load", _any_device
    yield torch, "clear_autocast_cache", _also_clearing_ours
    yield torch, "get_autocast_dtype", _dtype_lowered_to
    yield torch, "get_autocast_gpu_dtype", lambda original: lambda: torch.get_autocast_dtype("cuda")
    yield torch, "set_autocast_gpu_dtype", lambda original: lambda dtype: torch.set_autocast_dtype("cuda", dtype)
    yield from ((torch, name, _device_first) for name in _AUTOCAST_STATE)
    yield from ((owner, "cuda", _stays) for owner in _MOVABLE)
    yield from ((owner, "to", functools.partial(_any_device, second=_device_on_cpu)) for owner in _MOVABLE)
    yield torch.Tensor, "pin_memory", _stays
    yield torch.Tensor, "record_stream", _stays
    yield torch.Tensor, "type", _tensor_type_named
    yield torch, "set_default_tensor_type", _tensor_type_named
    yield torch, "Generator", gives(Generator)
    yield from ((torch.Tensor, name, _any_device) for name in _TENSOR_FACTORIES)
    yield from ((torch, name, _any_device) for name in (*_factories_of_torch(), *_FACTORIES_BY_EXAMPLE))
    # torch.set_default_device("cuda") and `with torch.device("cuda")`
    yield _device.DeviceContext, "__init__", _any_device
    yield torch.nn.Module, "to_empty", _any_device
    # nn.DataParallel calls its module as it is where there is no GPU.
    yield sys.modules[torch.nn.DataParallel.__module__], "_get_available_device_type", lambda original: gives(None)
    for module, values in ((torch.cuda, RUNTIME), (torch.cuda.nvtx, NVTX)):
        yield from ((module, name, gives(value)) for name, value in values.items())


def _factories_of_torch() -> list[str]:
    """``torch.zeros`` and all other functions of torch that take a device."""
    constructors = {function.__name__: function for function in _device._device_constructors()}
    return sorted(name for name, function in constructors.items() if getattr(torch, name, None) is function)


_AUTOCAST_STATE = ("is_autocast_enabled", "set_autocast_enabled", "set_autocast_dtype")
_DEVICES = ("device", "device_type", "map_location")
_MOVABLE = (torch.Tensor, torch.nn.Module)
_TENSOR_FACTORIES = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
_FACTORIES_BY_EXAMPLE = tuple(name for name in dir(torch) if name.endswith("_like"))


def _on_cpu(value: Any) -> Any:
    """The CPU instead of a GPU, by name or as a device; anything else as it is."""
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _device_on_cpu(device: Any) -> Any:
    """As :func:`_on_cpu`, where nothing but a device can stand: there a bare number is the index of a GPU."""
    return "cpu" if type(device) is int else _on_cpu(device)


def _device_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """The autocast state of a device named first; without a device torch means CUDA's, so the CPU's here."""

    @functools.wraps(original)
    def call(*args: Any) -> Any:
        if not args or not isinstance(args[0], str):
            return original("cpu", *args)
        return original(_on_cpu(args[0]), *args[1:])

    return call


def _dtype_lowered_to(original: Callable[[str], torch.dtype]) -> Callable[[str], torch.dtype]:
    """That of the region around; outside of any, CUDA's default, also in threads that were started since."""
    entered_in = threading.get_ident()

    @functools.wraps(original)
    def get_autocast_dtype(device_type: str) -> torch.dtype:
        dtype = original(_on_cpu(device_type))
        says_so = _on_cpu(device_type) != "cpu" or threading.get_ident() == entered_in
        return dtype if says_so or torch.is_autocast_enabled("cpu") else torch.float16

    return get_autocast_dtype


def _also_clearing_ours(original: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        original()
        weight_casts.clear()

    return clear_autocast_cache


def _stays(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return cuda


def _any_device(original: Callable[..., Any], second: Callable[[Any], Any] = _on_cpu) -> Callable[..., Any]:
    """Its device is its second argument, or has one of ``_DEVICES`` as its name."""

    # Wrapped: TorchScript compiles the source of what is wrapped, and torch.compile reads its signature.
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in _DEVICES:
            if name in kwargs:
                kwargs[name] = _device_on_cpu(kwargs[name])
        # Pinned memory is for copies to a GPU, and torch has none without one.
        kwargs.pop("pin_memory", None)
        return original(*args[:1], *map(second, args[1:2]), *args[2:], **kwargs)

    return call


def _tensor_type_named(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value for value in args)
        return original(*args, **kwargs)

    return call


def gives(value: Any) -> Callable[..., Any]:
    """A function that returns this, whatever it is called with."""
    return lambda *args, **kwargs: value


class Stream:
    """The stream that everything runs on: what was launched is done."""

    device = torch.device("cpu")
    synchronize = wait_stream = wait_event = staticmethod(gives(None))
    query = staticmethod(gives(True))
    is_capturing = staticmethod(gives(False))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what a stream of CUDA takes: a device and a priority."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    """A moment on that stream."""

    synchronize = wait = staticmethod(gives(None))
    query = staticmethod(gives(True))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what an event of CUDA takes: ``enable_timing`` and others."""
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._seconds - self._seconds) * 1e3


class _OnAnyDevice(type):
    """What a subclass of ``torch.Generator`` would not do: torch's own generators are instances too."""

    def __call__(cls, device: Any = "cpu") -> torch._C.Generator:
        return torch._C.Generator("cpu")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(metaclass=_OnAnyDevice):
    """Makes a generator of the CPU, whatever the device."""


TENSOR_TYPES = tuple(
    f"{kind}Tensor" for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)

RUNTIME: Mapping[str, Any] = {
    **{name: getattr(torch, name) for name in TENSOR_TYPES},
    "Event": Event,
    "Stream": Stream,
    "current_device": gives(0),
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    "initial_seed": functools.partial(torch.initial_seed),
    "memory_reserved": gives(0),
    "max_memory_reserved": gives(0),
    "memory_summary": gives(""),
    "memory_snapshot": gives(()),
    # What `with torch.cuda.device(0)` calls; -1 says that there is no device to go back to.
    "_exchange_device": gives(-1),
    "_maybe_exchange_device": gives(-1),
    **{name: gives(None) for name in ("init", "synchronize", "set_device", "set_stream")},
    **{name: gives(None) for name in ("set_per_process_memory_fraction", "reset_peak_memory_stats")},
    "reset_max_memory_allocated": gives(None),
}
"""What each attribute of ``torch.cuda`` is on a CPU. Not ``is_available``: code that asks takes its other branch.

Each has a function of its own: torch.compile refuses one under two names that it treats differently.
"""

NVTX: Mapping[str, Any] = {name: gives(None) for name in ("range_push", "range_pop", "mark")}
"""The same for ``torch.cuda.nvtx``, whose ``range`` calls these."""
