"""Where the values of a tensor come from: the weights, the batch as it is, or constants that the code writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.formats import FLOAT16

MOVING = frozenset(
    """
    _to_copy alias_copy cat clone copy expand_copy flip gather index index_select masked_select permute_copy repeat
    roll select_copy slice_copy stack t_copy take transpose_copy tril triu view_copy
    """.split()
)
"""Ops that only move, repeat, leave out or cast values, or put zeros among them."""

FILLING = frozenset({"fill", "index_fill", "masked_fill"})
"""Ops that write the number they are given."""

SAME = 1e-6
"""A constant is rounded when it is written into a tensor."""


class Origins:
    """Follows tensors by their storage from op to op, through views and casts; keeps none of them.

    What is not known to come from the weights or the batch comes from neither: a mask, or what the code reads
    from elsewhere.
    """

    def __init__(self, model: torch.nn.Module, batches: Sequence[Any] = ()) -> None:
        self._of_weights = {key for key in map(_storage, model.parameters()) if key}
        self._of_batch = dict(_leaves(batches))
        self._constants: set[float] = set()

    def leaf(self, tensor: torch.Tensor) -> str | None:
        """The path of the batch's leaf whose values the tensor holds, and no others; None where there is none."""
        return self._of_batch.get(_storage(tensor))

    def is_of_weights(self, tensor: torch.Tensor) -> bool:
        """Whether weights took part in it: what a model computes."""
        return _storage(tensor) in self._of_weights

    def is_written(self, value: float) -> bool:
        """Whether the code has written this magnitude somewhere as a constant."""
        return any(math.isclose(abs(value), constant, rel_tol=SAME) for constant in self._constants)

    def before(
        self,
        base_name: str,
        given: Sequence[torch.Tensor],
        numbers: Sequence[float],
        largest: Callable[[torch.Tensor], float],
    ) -> None:
        """Notes the constants that an op is given, as large as FP16 can hold or larger."""
        found = [abs(number) for number in numbers] if base_name in FILLING else []
        found += [largest(tensor) for tensor in given if not self.is_of_weights(tensor)]
        self._constants.update(value for value in found if value >= FLOAT16.largest)

    def after(self, base_name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Notes where the values come from that an op has made of ``given``."""
        of_weights = not _is_like(base_name) and any(map(self.is_of_weights, given))
        leaf = self._moved(base_name, given)
        for tensor in made:
            key = _storage(tensor)
            if not key:
                continue
            is_whole = _fills_its_storage(tensor)
            if leaf is not None and is_whole:
                self._of_batch[key] = leaf
            else:
                self._of_batch.pop(key, None)
            if of_weights and tensor.is_floating_point():
                self._of_weights.add(key)
            elif is_whole:
                self._of_weights.discard(key)

    def _moved(self, base_name: str, given: Sequence[torch.Tensor]) -> str | None:
        if base_name not in MOVING or not given:
            return None
        leaves = {self.leaf(tensor) for tensor in given if tensor is given[0] or tensor.is_floating_point()}
        return leaves.pop() if len(leaves) == 1 else None


def _is_like(base_name: str) -> bool:
    """Whether an op takes no more than shape and dtype from the tensor it is given."""
    return base_name.endswith("_like") or base_name.startswith("new_")


def _leaves(batches: Iterable[Any]) -> Iterator[tuple[int, str]]:
    for batch in batches:
        for path, leaf in _pytree.tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, torch.Tensor) and (key := _storage(leaf)):
                yield key, _pytree.keystr(path)


def _storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes >= tensor.untyped_storage().nbytes()
