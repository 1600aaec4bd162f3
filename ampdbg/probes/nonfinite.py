"""Counting inf and NaN in tensors: dense or sparse, any float dtype; nothing is changed or kept."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils import _pytree

from ampdbg.record.run import TensorCounts


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite, in one pass over memory; True for integers and empty tensors.

    ``aminmax`` propagates NaN, so both ends are finite exactly when all elements are. On a GPU this syncs.
    """
    values = float_values(tensor)
    if values is None or values.numel() == 0:
        return True
    low, high = torch.aminmax(values.detach())
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def count_nonfinite(tensor: torch.Tensor) -> tuple[int, int]:
    """The numbers of infinite and of NaN elements."""
    values = float_values(tensor)
    if values is None:
        return 0, 0
    values = values.detach()
    return int(torch.isinf(values).sum()), int(torch.isnan(values).sum())


def float_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's floating-point values as a dense tensor, or None when it has none.

    A sparse gradient is coalesced first, as the scaler does: entries that are finite one by one can
    overflow in their sum. Complex numbers are seen as pairs.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.device.type == "meta":
        return None
    # aminmax and isfinite have no kernels for the 8-bit formats.
    return tensor.float() if tensor.element_size() == 1 else tensor


def nonfinite_in_batch(batch: Any) -> tuple[TensorCounts, ...]:
    """The leaves of a batch that hold inf or NaN, with the index of the first such element."""
    leaves, _ = _pytree.tree_flatten_with_path(batch)
    named = ((_pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor))
    return tuple(_counts("batch", named))


def nonfinite_in_model(
    model: torch.nn.Module, when: When = "before", but: Container[str] = ()
) -> tuple[TensorCounts, ...]:
    """The parameters and buffers of a model that hold inf or NaN, ``but`` for these names; ``when`` is passed on."""
    parameters = (pair for pair in model.named_parameters() if pair[0] not in but)
    buffers = (pair for pair in model.named_buffers() if pair[0] not in but)
    return (*_counts("parameter", parameters, when), *_counts("buffer", buffers, when))


When = Literal["before", "after"]


def _counts(
    kind: Literal["batch", "parameter", "buffer"], named: Iterable[tuple[str, torch.Tensor]], when: When = "before"
) -> Iterator[TensorCounts]:
    for name, tensor in named:
        if not is_finite(tensor):
            inf, nan = count_nonfinite(tensor)
            yield TensorCounts(kind, name, inf, nan, tensor.numel(), _first_index(tensor), when)


def _first_index(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is not torch.strided:
        return ()
    index = torch.nonzero(~torch.isfinite(tensor.detach()))[0]
    return tuple(int(number) for number in index)
