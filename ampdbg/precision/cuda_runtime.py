"""What ``torch.cuda`` offers beside tensors, on a CPU: one device, whose streams and events are always done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _gives(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class Stream:
    """The stream that everything runs on: what was launched is done."""

    synchronize = wait_stream = wait_event = staticmethod(_does_nothing)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what a stream of CUDA takes: a device and a priority."""

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    """A moment on that stream."""

    synchronize = wait = staticmethod(_does_nothing)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what an event of CUDA takes: ``enable_timing`` and others."""
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

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
    "current_device": _gives(0),
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    "initial_seed": torch.initial_seed,
    "memory_reserved": _gives(0),
    "max_memory_reserved": _gives(0),
    # What `with torch.cuda.device(0)` calls; -1 says that there is no device to go back to.
    "_exchange_device": _gives(-1),
    "_maybe_exchange_device": _gives(-1),
    **dict.fromkeys(
        ("init", "synchronize", "set_device", "reset_peak_memory_stats", "reset_max_memory_allocated"), _does_nothing
    ),
}
"""What each attribute of ``torch.cuda`` is on a CPU. Not ``is_available``: code that asks takes its other branch."""

NVTX: Mapping[str, Any] = dict.fromkeys(("range_push", "range_pop", "mark"), _does_nothing)
"""The same for ``torch.cuda.nvtx``, whose ``range`` calls these."""
