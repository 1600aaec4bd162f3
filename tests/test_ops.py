"""Kinds of op: names are read from ATen's, and ops that stand in several kinds mean the same in each."""

from __future__ import annotations

import pytest
import torch

from ampdbg import ops


@pytest.mark.parametrize(
    ("op", "base"),
    [
        (torch.ops.aten.mm.default, "mm"),
        (torch.ops.aten.mul_.Tensor, "mul"),
        (torch.ops.aten._to_copy.default, "_to_copy"),
        (torch.ops.aten.sum.dim_IntList, "sum"),
    ],
)
def test_an_ops_base_name(op: object, base: str) -> None:
    assert ops.base_name(str(op)) == base


@pytest.mark.parametrize("kind", ["CASTS", "ATEN_MOVES", "FILLS", "OVERWRITES", "ALLOCATES", "SUMS", "POLES"])
def test_every_op_of_aten_exists(kind: str) -> None:
    missing = [name for name in getattr(ops, kind) if not hasattr(torch.ops.aten, name)]
    assert missing == []


def test_what_moves_values_neither_multiplies_nor_adds_them() -> None:
    assert not (ops.MOVES | ops.ATEN_MOVES) & (ops.PRODUCTS | ops.SCALINGS | ops.SUMS | ops.RANDOM)
