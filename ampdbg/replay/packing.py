"""Packs values as JSON plus tensors, for the file with the arguments of a step, and unpacks them.

Nothing is pickled. A value that JSON cannot express, such as an object of the user's own class, is only named. The
reader needs a similar object, made by another run of the same code.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, Protocol

import numpy
import torch

from ampdbg.errors import AmpdbgError, first_line
from ampdbg.replay.random_state import RandomState, kept_random_state
from ampdbg.replay.state import OBJECT, Kinds, SavedContents

SCALARS: Mapping[type, tuple[str, Callable[[Any], bool], Callable[[Any], str]]] = {
    NoneType: ("", lambda value: False, str),
    bool: ("", lambda value: False, str),
    int: ("int", lambda value: abs(value) >= 2**63, hex),
    float: ("float", lambda value: not math.isfinite(value), str),
    str: ("text", lambda value: not value.isprintable(), lambda value: value.encode("utf-8", "surrogatepass").hex()),
    bytes: ("bytes", lambda value: True, bytes.hex),
    torch.dtype: ("dtype", lambda value: True, lambda value: str(value).removeprefix("torch.")),
}
"""The types that JSON can express: the key, a test for values that JSON readers may reject, and the text for these."""

CONSTANT: Mapping[type, Callable[[Any], Any]] = {
    slice: lambda value: (value.start, value.stop, value.step),
    complex: lambda value: (value.real, value.imag),
    torch.Size: list,
}
"""Immutable types, each with a function that returns the parts of a value."""

PLAIN = (list, tuple, set, deque)
"""Containers that are rebuilt from their contents."""


class PackedError(AmpdbgError):
    """The packed data is damaged."""


class NotAtHandError(PackedError):
    """The packed data does not fit the objects of this script."""


class Tensors(Protocol):
    """The tensors of packed values by name."""

    def keys(self) -> Iterable[str]: ...

    def __getitem__(self, name: str) -> torch.Tensor: ...


class Packing:
    """Packs values; ``tensors`` has the tensors of all values so far, on the CPU, each once.

    Args:
        prefix: the beginning of the names of the tensors.
        held: the contents of values at one moment. With it, a value without such contents raises. By default current
            contents are packed, and a value that cannot be written is named.
    """

    def __init__(self, prefix: str, held: SavedContents | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix
        self._held = held
        self._kinds = Kinds()
        self._met: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return the value as JSON, the same object for the same value.

        Raises:
            KeyError: the value, or its contents, cannot be written.
        """
        if type(value) in SCALARS:
            key, is_beyond, text = SCALARS[type(value)]
            return {key: text(value)} if is_beyond(value) else value
        if id(value) not in self._met:
            self._met[id(value)] = value, None
            self._met[id(value)] = value, self._packed(value)
        return self._met[id(value)][1] or self._named(value)  # the value contains itself

    def _packed(self, value: Any) -> Any:
        cls, kind = type(value), self._kinds[type(value)]
        if cls in CONSTANT:
            return {cls.__name__: [self.of(part) for part in CONSTANT[cls](value)]}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, value if self._held is None else self._held.copy_of(value))
        if kind is None or kind.make is None:
            return self._named(value)
        contents = kind.save(value) if self._held is None else self._held.contents(value)
        if isinstance(contents, (numpy.ndarray, numpy.generic)):
            return self._array(contents)
        if not kind.holds:
            return self._generator(value, contents)
        inner = [self.of(part) for part in kind.inner(contents)]
        if cls in PLAIN:
            return {cls.__name__: inner, **({"maxlen": value.maxlen} if cls is deque else {})}
        keys = {"keys": [self.of(name) for name in contents]} if isinstance(contents, dict) else {}
        return {"like": type_name(value), **keys, "inner": inner}

    def _tensor(self, tensor: torch.Tensor, values: torch.Tensor) -> Any:
        if not can_be_written(tensor):
            return self._named(tensor)
        name = f"{self._prefix}.{len(self.tensors)}"
        self.tensors[name] = written_form(values)
        placed: dict[str, Any] = {"tensor": name, "device": tensor.device.type}
        if tensor.is_complex():
            placed["complex"] = True
        return placed | ({"grad": True} if tensor.is_leaf and tensor.requires_grad else {})

    def _array(self, array: Any) -> Any:
        try:
            values = torch.from_numpy(numpy.array(array, ndmin=1))
        except TypeError:  # of strings, objects, or numbers that torch does not have
            return self._named(array)
        return {"array": self._tensor(values, values), "shape": list(array.shape)}

    def _generator(self, value: Any, state: Any) -> Any:
        packing = Packing(f"{self._prefix}.{len(self._met)}")  # the contents belong to this value alone
        inner = [packing.of(state)]
        self.tensors |= packing.tensors
        return {"like": type_name(value), "inner": inner}

    def _named(self, value: Any) -> dict[str, str]:
        if self._held is not None:
            raise KeyError(type_name(value))
        return {"live": type_name(value)}


def written_form(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU with its own memory; complex numbers become pairs."""
    values = tensor.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    copied = values.resolve_neg().to("cpu", copy=True)
    return copied.contiguous()


def can_be_written(tensor: torch.Tensor) -> bool:
    """True if the tensor consists of plain numbers in memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def type_name(value: Any) -> str:
    """Return the name under which an object or class is written."""
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


class Unpacking:
    """Builds values from their packed form.

    Args:
        tensors: the tensors by their packed names.
        device: the device for tensors that were not on the CPU.
    """

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._kinds = Kinds()
        self._met: dict[Any, tuple[Any, Any]] = {}

    def of(self, packed: Any, live: Any = None) -> Any:
        """Return the value, the same object for the same packed one. ``live`` is used if it was not written.

        Raises:
            NotAtHandError: the value needs a live one that does not exist.
            PackedError: the packed data is damaged.
        """
        if isinstance(packed, str):
            return sys.intern(packed)  # some code compares strings by identity, as literals are interned
        if packed is None or isinstance(packed, (bool, int, float)):
            return packed
        name = next(iter(packed), "") if isinstance(packed, dict) else ""
        if name not in _MAKE:
            raise PackedError(f"damaged: a value of no kind: {str(packed)[:80]}")
        key = str(packed[name]) if name == "tensor" else id(packed)
        if key not in self._met:
            self._met[key] = packed, _MAKE[name](self, packed[name], packed, live)
        return self._met[key][1]

    def _each(self, parts: Any, live: Any) -> list[Any]:
        if not isinstance(parts, list):
            raise PackedError(f"damaged: parts of a value: {str(parts)[:80]}")
        beside = list(live) if isinstance(live, (list, tuple, deque)) else []
        beside += [None] * (len(parts) - len(beside))
        return [self.of(part, other) for part, other in zip(parts, beside, strict=False)]

    def _dtype(self, name: Any, packed: Mapping[str, Any], live: Any) -> torch.dtype:
        found = getattr(torch, str(name), None)
        if not isinstance(found, torch.dtype):
            raise PackedError(f"damaged: torch has no dtype {str(name)[:80]}")
        return found

    def _array(self, values: Any, packed: Mapping[str, Any], live: Any) -> Any:
        array = self.of(values).cpu().numpy().reshape(packed.get("shape", []))
        return array if packed.get("shape") else array[()]

    def _tensor(self, name: Any, packed: Mapping[str, Any], live: Any) -> torch.Tensor:
        values = self._tensors[str(name)]
        values = torch.view_as_complex(values) if packed.get("complex") else values
        values = values if packed.get("device") == "cpu" else values.to(self._device)
        # Not a view, as safetensors returns: a step's write into a view cannot be undone.
        return values.detach().requires_grad_(bool(packed.get("grad")))

    def _like(self, name: Any, packed: Mapping[str, Any], live: Any) -> Any:
        keys, inner = [self.of(key) for key in packed.get("keys", [])], list(packed.get("inner", []))
        if name == "builtins.dict":
            live = dict(live) if isinstance(live, dict) else {}
        kind = self._kinds[type(_checked(live, str(name)))]
        if kind is None or kind.make is None:
            raise NotAtHandError(f"ampdbg cannot make a {name} again")
        held = kind.save(live)
        if kind is OBJECT and list(held) != keys:
            raise NotAtHandError(f"this script's {name} holds {', '.join(held)}; captured: {keys}")
        if not kind.holds:
            contents = self.of(inner[0]) if inner else held
        elif isinstance(held, dict):
            contents = {key: self.of(one, held.get(key)) for key, one in zip(keys, inner, strict=True)}
        else:
            contents = self._each(inner, held)
        try:
            return kind.make(live, contents)
        except Exception as error:  # the user's class may raise anything
            raise NotAtHandError(f"this script's {name} does not take the captured one: {first_line(error)}") from error


_MAKE: Mapping[str, Callable[[Unpacking, Any, Mapping[str, Any], Any], Any]] = {
    "float": lambda unpacking, text, packed, live: float(text),
    "int": lambda unpacking, text, packed, live: int(text, 16),
    "bytes": lambda unpacking, text, packed, live: bytes.fromhex(text),
    "text": lambda unpacking, text, packed, live: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "dtype": Unpacking._dtype,
    "slice": lambda unpacking, parts, packed, live: slice(*unpacking._each(parts, None)),
    "complex": lambda unpacking, parts, packed, live: complex(*unpacking._each(parts, None)),
    "Size": lambda unpacking, parts, packed, live: torch.Size(unpacking._each(parts, None)),
    "list": lambda unpacking, parts, packed, live: unpacking._each(parts, live),
    "tuple": lambda unpacking, parts, packed, live: tuple(unpacking._each(parts, live)),
    "set": lambda unpacking, parts, packed, live: set(unpacking._each(parts, live)),
    "deque": lambda unpacking, parts, packed, live: deque(unpacking._each(parts, live), packed.get("maxlen")),
    "tensor": Unpacking._tensor,
    "array": Unpacking._array,
    "live": lambda unpacking, name, packed, live: _checked(live, str(name)),
    "like": Unpacking._like,
}
"""Builders of values, by the first key of the packed form."""


def _checked(live: Any, name: str) -> Any:
    if type_name(live) != name:
        raise NotAtHandError(
            f"the step takes a {name}, which a capture cannot hold; this script has a {type_name(live)}"
        )
    return live


def packed_random_state(state: RandomState, packing: Packing) -> Any:
    """Return a random state as JSON and tensors."""
    version, words, gauss = state.python
    name, *parts = state.numpy
    legacy = [torch.tensor(parts[0].astype("int64")), *parts[1:]] if name == "MT19937" else None
    return packing.of([[version, torch.tensor(words), gauss], legacy, state.cpu, list(state.devices)])


def unpacked_random_state(packed: Any, unpacking: Unpacking) -> RandomState:
    """Return the packed random state. The current one stays for a different number of GPUs or kind of NumPy generator.

    Raises:
        PackedError: the packed data is damaged.
    """
    try:
        with kept_random_state() as now:
            (version, words, gauss), legacy, cpu, devices = unpacking.of(packed)
            python = version, tuple(words.tolist()), None if gauss is None else float(gauss)
            numpys = ("MT19937", legacy[0].numpy().astype("uint32"), *legacy[1:]) if legacy else now.numpy
            devices = tuple(each.cpu() for each in devices) if len(devices) == len(now.devices) else now.devices
            made = RandomState(python, numpys, cpu.cpu(), devices)
            made.restore()  # damaged data raises here, not in the script
            return made
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise PackedError(f"damaged: its random state: {first_line(error)}") from None
