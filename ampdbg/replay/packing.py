"""Values as JSON, with their tensors beside it: how what a step was given is written to a file and read again.

Nothing is pickled. What JSON has no word for, such as an object of the user's own, is not written but named: whoever
reads it has the like of it at hand, from the same code that has run again.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy
import torch

from ampdbg.errors import AmpdbgError, first_line
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.state import Kinds

PLAIN: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "deque": deque,
    "slice": lambda parts: slice(*parts),
    "Size": torch.Size,
    "complex": lambda parts: complex(*parts),
}
"""Types that are made anew from what they hold."""

DEEPEST = 100
"""Containers within containers."""


class PackedError(AmpdbgError):
    """What was packed does not fit what is at hand, or is damaged."""


class Tensors(Protocol):
    """Where the tensors of packed values are."""

    def __getitem__(self, name: str) -> torch.Tensor: ...


class Packing:
    """Packs values; ``tensors`` are those of all values so far, on the CPU, each once.

    Args:
        prefix: what the names of the tensors begin with.
    """

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix
        self._kinds = Kinds()
        self._met: dict[int, tuple[Any, str]] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON."""
        if value is None or type(value) in (bool, str, int, float, bytes):
            return _scalar(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._array(value)
        if depth > DEEPEST:
            return _named(value)
        parts = _parts_of(value)
        if parts is not None:
            return {type(value).__name__: [self.of(part, depth + 1) for part in parts]}
        return self._like(value, depth)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if not can_be_written(tensor):
            return _named(tensor)
        if id(tensor) not in self._met:
            name = f"{self._prefix}.{len(self._met)}"
            self.tensors[name] = written_form(tensor)
            self._met[id(tensor)] = tensor, name
        placed: dict[str, Any] = {"tensor": self._met[id(tensor)][1], "device": tensor.device.type}
        if tensor.is_complex():
            placed["complex"] = True
        return placed | ({"grad": True} if tensor.requires_grad else {})

    def _array(self, array: Any) -> Any:
        try:
            return {"array": self.of(torch.from_numpy(numpy.array(array, ndmin=1))), "shape": list(array.shape)}
        except TypeError:  # of strings, of objects, of numbers that torch has not
            return _named(array)

    def _like(self, value: Any, depth: int) -> Any:
        kind = self._kinds[type(value)]
        if kind is None or kind.make is None:
            return _named(value)
        contents = kind.save(value) if kind.holds else ()
        keys = {"keys": [self.of(name, depth + 1) for name in contents]} if isinstance(contents, dict) else {}
        inner = [self.of(part, depth + 1) for part in kind.inner(contents)]
        return {"like": type_name(value), **keys, "inner": inner}


def _scalar(value: Any) -> Any:
    """As JSON has it; what any reader of JSON may not take, in a form of its own."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, str) and not value.isprintable():
        return {"text": value.encode("utf-8", "surrogatepass").hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return {"int": hex(value)} if isinstance(value, int) and abs(value) >= 2**63 else value


def written_form(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU with memory of its own, complex numbers as pairs."""
    values = tensor.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    copied = values.resolve_neg().to("cpu", copy=True)
    return copied.contiguous()


def can_be_written(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of plain numbers in memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _parts_of(value: Any) -> Sequence[Any] | None:
    """What a value of a type in PLAIN holds; None for any other."""
    if type(value) is slice:
        return (value.start, value.stop, value.step)
    if type(value) is complex:
        return (value.real, value.imag)
    return list(value) if type(value) in (list, tuple, set, deque, torch.Size) else None


def _named(value: Any) -> dict[str, str]:
    return {"live": type_name(value)}


def type_name(value: Any) -> str:
    """The name that an object, or its class, is written by."""
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


class Unpacking:
    """Makes values of packed ones.

    Args:
        tensors: by the names that were packed.
        device: where tensors go that were not on the CPU.
    """

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._kinds = Kinds()
        self._met: dict[str, torch.Tensor] = {}

    def of(self, packed: Any, live: Any = None) -> Any:
        """The value; ``live`` is the like of it, which is taken where the value was not written.

        Raises:
            PackedError: it needs one that is not at hand, or is damaged.
        """
        if packed is None or isinstance(packed, (bool, int, float, str)):
            return packed
        for kind, parts in packed.items() if isinstance(packed, dict) else ():
            make = _MAKE.get(kind)
            if make is not None:
                return make(self, parts, packed, live)
            if kind in PLAIN and isinstance(parts, list):
                return PLAIN[kind](self._each(parts, live))
            break  # the first key tells
        raise PackedError(f"damaged: a value of no kind: {str(packed)[:80]}")

    def _dtype(self, name: Any, packed: Mapping[str, Any], live: Any) -> torch.dtype:
        found = getattr(torch, str(name), None)
        if not isinstance(found, torch.dtype):
            raise PackedError(f"damaged: torch has no dtype {str(name)[:80]}")
        return found

    def _array(self, values: Any, packed: Mapping[str, Any], live: Any) -> Any:
        array = self.of(values).cpu().numpy().reshape(packed.get("shape", []))
        return array if packed.get("shape") else array[()]

    def _live(self, name: Any, packed: Mapping[str, Any], live: Any) -> Any:
        return _checked(live, str(name))

    def _each(self, parts: list[Any], live: Any) -> list[Any]:
        beside = list(live) if isinstance(live, (list, tuple, deque)) else []
        beside += [None] * (len(parts) - len(beside))
        return [self.of(part, other) for part, other in zip(parts, beside, strict=False)]

    def _tensor(self, name: Any, packed: Mapping[str, Any], live: Any) -> torch.Tensor:
        name = str(name)
        if name not in self._met:
            values = self._tensors[name]
            values = torch.view_as_complex(values) if packed.get("complex") else values
            values = values if packed.get("device") == "cpu" else values.to(self._device)
            # No view, as safetensors gives them: what a step writes into one cannot be undone.
            self._met[name] = values.detach().requires_grad_(bool(packed.get("grad")))
        return self._met[name]

    def _like(self, name: Any, packed: Mapping[str, Any], live: Any) -> Any:
        keys, inner = [self.of(key) for key in packed.get("keys", [])], list(packed.get("inner", []))
        if name == "builtins.dict":
            others = live if isinstance(live, dict) else {}
            return {key: self.of(value, others.get(key)) for key, value in zip(keys, inner, strict=True)}
        kind = self._kinds[type(_checked(live, str(name)))]
        if kind is None or kind.make is None:
            raise PackedError(f"a {name} is at hand that cannot be made again")
        held = kind.save(live)
        if not kind.holds:
            return kind.make(live, held)
        if isinstance(held, dict):
            if list(held) != keys:
                raise PackedError(f"the {name} at hand holds {', '.join(map(str, held))}; captured: {keys}")
            return kind.make(live, {key: self.of(one, held[key]) for key, one in zip(keys, inner, strict=True)})
        if len(held) != len(inner) and hasattr(live, "_fields"):
            raise PackedError(f"the {name} at hand has {len(held)} fields; captured: {len(inner)}")
        return kind.make(live, self._each(inner, held))


_MAKE: Mapping[str, Callable[[Unpacking, Any, Mapping[str, Any], Any], Any]] = {
    "float": lambda unpacking, text, packed, live: float(text),
    "int": lambda unpacking, text, packed, live: int(text, 16),
    "bytes": lambda unpacking, text, packed, live: bytes.fromhex(text),
    "text": lambda unpacking, text, packed, live: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "dtype": Unpacking._dtype,
    "tensor": Unpacking._tensor,
    "array": Unpacking._array,
    "live": Unpacking._live,
    "like": Unpacking._like,
}
"""What makes a value, by the first key of what it was packed as."""


def _checked(live: Any, name: str) -> Any:
    if type_name(live) != name:
        raise PackedError(f"the step was given a {name}, which is not written; at hand is a {type_name(live)}")
    return live


def packed_random_state(state: RandomState, packing: Packing) -> Any:
    """A random state as JSON and tensors."""
    version, words, gauss = state.python
    legacy = state.numpy if isinstance(state.numpy, tuple) and state.numpy[0] == "MT19937" else None
    numpy = None if legacy is None else [torch.tensor(legacy[1].astype("int64")), *map(_plain_number, legacy[2:])]
    python = [version, torch.tensor(words), gauss]
    return packing.of([python, numpy, state.cpu, list(state.devices)])


def _plain_number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def unpacked_random_state(packed: Any, unpacking: Unpacking) -> RandomState:
    """The random state again; of NumPy and GPUs that this process does not use there is none.

    Raises:
        PackedError: it is damaged.
    """
    now = RandomState.now()
    try:
        (version, words, gauss), numpy, cpu, devices = unpacking.of(packed)
        python = version, tuple(words.tolist()), gauss
        if numpy is not None and now.numpy is not None:
            numpy = ("MT19937", numpy[0].numpy().astype("uint32"), *numpy[1:])
        devices = tuple(each.cpu() for each in devices) if len(devices) == len(now.devices) else now.devices
        made = RandomState(python, numpy if now.numpy is not None and numpy else now.numpy, cpu.cpu(), devices)
        _try_out(made, now)
        return made
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise PackedError(f"damaged: its random state: {first_line(error)}") from None


def _try_out(state: RandomState, now: RandomState) -> None:
    """Gives the state to generators that nobody else uses: what is damaged raises here, and not in the script."""
    random.Random().setstate(state.python)
    if not isinstance(state.python[2], (float, type(None))):
        raise TypeError(f"a {type(state.python[2]).__name__} in the place of a number that was drawn")
    if state.numpy is not None and state.numpy is not now.numpy:
        numpy.random.RandomState().set_state(state.numpy)
    torch.Generator().set_state(state.cpu)
    for one, own in zip(state.devices, now.devices, strict=True):
        if (one.dtype, one.shape) != (own.dtype, own.shape):
            raise ValueError(f"of a GPU it is {one.dtype} of {one.numel()}; needed: {own.dtype} of {own.numel()}")
