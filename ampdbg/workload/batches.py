"""Endless batches on the device from any kind of data target, and their description in messages."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from ampdbg.workload.targets import Found, a

_END = object()


class Batches(Protocol):
    """The endless batches of a workload, on the device. ``position`` is the index of the latest batch."""

    position: int

    def batches(self) -> Iterator[Any]:
        """Yield every batch, over and over."""

    def describe(self, batch: Any) -> str:
        """Describe a batch for messages."""


class BatchSource:
    """The data of a workload. Every pass restarts the data, or makes it again if it is a one-shot iterator."""

    def __init__(self, found: Found, device: torch.device) -> None:
        self.found = found
        self.device = device
        self.position = -1
        self._delivered_id: int | None = None
        self._is_factory = is_factory(found.value)
        self._data = self._make()
        self._is_spent = False

    def batches(self) -> Iterator[Any]:
        """Yield every batch, moved to the device, over and over.

        Raises:
            WorkloadError: the data is empty, or has ended and cannot restart.
            UserCodeError: reading a batch raised.
        """
        count = 0
        while True:
            iterator, before = self._start(), count
            while (batch := self._next(iterator, count)) is not _END:
                self.position, self._delivered_id = count, id(batch)
                yield batch
                del batch  # a batch must not outlive its step
                count += 1
            if count == 0:
                raise self.found.refuse("gave no batches; needed: at least one")
            if count == before:
                raise self.found.refuse(
                    f"ended after {count} batches and cannot be started again; "
                    "needed: a list, a DataLoader, or a function that makes the batches"
                )

    def describe(self, batch: Any) -> str:
        """Return ``batch 3 holds [0]: float32 [8, 3]; [1]: int64 [8]``. Only the latest batch has a number."""
        number = f" {self.position}" if id(batch) == self._delivered_id else ""
        leaves = [
            f"{path or 'a tensor'}: {str(leaf.dtype)[6:]} {list(leaf.shape)}" for path, leaf in tensor_leaves(batch)
        ]
        return f"batch{number} holds {'; '.join(leaves[:8]) if leaves else a(batch)}"

    def _start(self) -> Iterator[Any]:
        if self._is_spent:
            self._data = self._make()
        self._is_spent = self._is_factory and isinstance(self._data, Iterator)
        with self.found.user.running(f"{self.found.named}: starting it"):
            return iter(self._data)

    def _next(self, iterator: Iterator[Any], index: int) -> Any:
        with self.found.user.running(f"{self.found.named}: reading batch {index}"):
            batch = next(iterator, _END)
            return batch if batch is _END else to_device(batch, self.device)

    def _make(self) -> Any:
        found = self.found
        if self._is_factory:
            data = found.made()
        else:
            found.refuse_arguments()
            data = found.value
        if hasattr(data, "train_dataloader"):
            data = self._train_dataloader(data)
        problem = why_no_batches(data)
        if problem:
            raise found.refuse(f"{'returned' if self._is_factory else 'is'} {problem}")
        return data

    def _train_dataloader(self, module: Any) -> Any:
        """Return a data module's loader after calling the hooks that Lightning calls before it."""
        for hook, argument in (("prepare_data", ()), ("setup", ("fit",))):
            method = getattr(module, hook, None)
            if callable(method):
                with self.found.user.running(f"{self.found.named}: {hook}()"):
                    method(*argument[: len(inspect.signature(method).parameters)])
        with self.found.user.running(f"{self.found.named}: train_dataloader()"):
            return module.train_dataloader()


def is_factory(value: object) -> bool:
    """True if ``value`` makes the data and is not the data itself."""
    is_data = any(hasattr(value, name) for name in ("__iter__", "train_dataloader"))
    return isinstance(value, type) or (callable(value) and not is_data)


def why_no_batches(data: Any) -> str | None:
    """Return why ``data`` is not an iterable of batches, continuing ``"it is ..."``, or None if it is one."""
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    if any(isinstance(item, DataLoader) for item in items):
        return f"{a(data)} of several DataLoaders; needed: one"
    is_tuple_of_tensors = isinstance(data, tuple) and {isinstance(item, torch.Tensor) for item in data} == {True}
    if is_tuple_of_tensors or isinstance(data, (torch.Tensor, Mapping)):
        return f"{a(data)}, which looks like one batch; needed: an iterable of batches, such as [batch]"
    if isinstance(data, Dataset) and not hasattr(data, "__iter__"):
        return f"{a(data)}, a Dataset of single samples; needed: batches; wrap it in a DataLoader"
    if isinstance(data, (str, bytes)) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        return f"{a(data)}; needed: an iterable of batches, a factory of one, or an object with train_dataloader()"
    return None


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in ``batch`` to ``device``, also in containers, dataclasses and objects with ``.to``.

    Lists, tuples, dicts and dataclasses are copied, so that the user's own do not change. Other leaves are kept.
    """
    if not isinstance(batch, type) and callable(getattr(batch, "to", None)):
        moved = batch.to(device)
        if type(batch) is torch.Tensor and batch.is_leaf and batch.requires_grad and moved is not batch:
            return moved.detach().requires_grad_()  # still a leaf, because its gradient is read there
        return batch if moved is None else moved  # some objects move in place
    if isinstance(batch, tuple):
        return tuple.__new__(type(batch), (to_device(item, device) for item in batch))
    if isinstance(batch, list):
        moved = copy.copy(batch)
        moved[:] = [to_device(item, device) for item in batch]
        return moved
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        moved.update({key: to_device(value, device) for key, value in batch.items()})
        return moved
    fields = _fields(batch)
    moved = copy.copy(batch) if fields else batch
    for name in fields:
        # Works for frozen dataclasses too, and does not rerun __post_init__.
        object.__setattr__(moved, name, to_device(getattr(batch, name), device))
    return moved


def _fields(value: Any) -> tuple[str, ...]:
    """Return the field names of a dataclass instance, or an empty tuple for any other value."""
    is_one = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return tuple(field.name for field in dataclasses.fields(value)) if is_one else ()


def tensor_leaves(batch: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in ``batch`` with its path: ``[0]``, ``['input_ids']``, ``.pixels``, or ``""`` for itself."""
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensor_leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from tensor_leaves(value, f"{path}[{index}]")
    else:
        for name in _fields(batch):
            yield from tensor_leaves(getattr(batch, name), f"{path}.{name}")
