"""A digest of what a value holds: tensors and arrays by their bytes, containers by what is in them, others by repr."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

DEEPEST = 50
"""Values within values are read so deep: a batch may lead to its whole data set."""

ADDRESS = re.compile(r"0x[0-9A-Fa-f]+")
"""Where an object lies in memory, as a repr says it; in the next process it lies elsewhere."""


def content_digest(value: object) -> str:
    """The SHA-256 of what a value holds; equal where dtypes, shapes, bytes, names and order are.

    Args:
        value: a batch, a list of weights or anything else. Tensors may be on any device.
    """
    digest = hashlib.sha256()
    for part in _parts(value, {}, 0):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: object, met: dict[int, object], depth: int) -> Iterator[Any]:
    """What identifies a value, as bytes and buffers. ``met`` are containers that were entered, kept alive."""
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value, met, depth)
        return
    held = _held(value)
    yield f"{type(value).__qualname__} of {len(held)}:".encode()
    if id(value) in met or depth > DEEPEST:
        return
    if not held:
        yield _bytes(value)
        return
    met[id(value)] = value
    for inner in held:
        yield from _parts(inner, met, depth + 1)


def _held(value: object) -> list[object]:
    """What is in a container or in an object's attributes."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, (type, ModuleType)) or callable(value):
        return []
    attributes = getattr(value, "__dict__", {})
    return [*attributes.keys(), *attributes.values()]


def _bytes(value: object) -> bytes:
    try:
        content = memoryview(value).tobytes()  # type: ignore[arg-type]  # what has no buffer, has a repr
    except (TypeError, ValueError, BufferError):
        content = ADDRESS.sub("", repr(value)).encode("utf-8", "backslashreplace")
    return f"{len(content)}:".encode() + content


def _of_tensor(tensor: torch.Tensor, met: dict[int, object], depth: int) -> Iterator[Any]:
    yield f"{tensor.dtype} {tuple(tensor.shape) if not tensor.is_nested else 'nested'}:".encode()
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor made of others: distributed, quantized or nested
        names, _ = tensor.__tensor_flatten__()
        yield from _parts([getattr(tensor, name) for name in names], met, depth + 1)
    elif tensor.is_nested:
        yield from _parts(list(tensor.unbind()), met, depth + 1)
    else:
        yield from _buffer(tensor.detach())


def _buffer(tensor: torch.Tensor) -> Iterator[Any]:
    """The bytes of a tensor, without a copy where it lies in the CPU's memory in one piece."""
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    dense = dense if dense.layout is torch.strided else dense.to_dense()
    dense = dense.resolve_conj().resolve_neg().cpu().contiguous()
    address, size = dense.data_ptr(), dense.numel() * dense.element_size()
    if address and size:
        yield (ctypes.c_char * size).from_address(address)
