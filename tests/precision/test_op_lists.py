"""The op lists are those of the installed torch's ``autocast_mode.h``, and of 2.13 where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ampdbg.precision.autocast_policy import (
    BANNED,
    BUILT_IN,
    FP32_APPEND_DTYPE,
    installed_lists,
    lists_of_header,
)
from ampdbg.precision.half_kernels import find_op

TORCH = Path(torch.__file__).parent
HEADER = TORCH / "include" / "ATen" / "autocast_mode.h"
TABLE_MADE_FROM = (2, 13)

has_header = pytest.mark.skipif(not HEADER.exists(), reason="this build of torch ships no headers")


@has_header
def test_the_installed_header_is_read() -> None:
    lists = installed_lists(TORCH)
    assert lists is not BUILT_IN
    assert {"linear", "mm", "conv2d", "einsum"} <= lists["LOWER_PRECISION_FP"]
    assert {"exp", "layer_norm", "pow.Tensor_Scalar"} <= lists["FP32"]
    assert {"softmax.int", "sum.dim_IntList"} <= lists["FP32_SET_OPT_DTYPE"]
    assert {"addcmul", "index_put"} <= lists["PROMOTE"]
    assert sum(map(len, lists.values())) == len(frozenset().union(*lists.values())), "an op stands in two lists"


def test_every_op_that_is_listed_or_registered_by_hand_exists() -> None:
    listed = frozenset().union(*installed_lists(TORCH).values())
    by_hand = [*FP32_APPEND_DTYPE, *FP32_APPEND_DTYPE.values(), *BANNED]
    assert [name for name in (*sorted(listed), *by_hand) if find_op(name) is None] == []


@has_header
@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) != TABLE_MADE_FROM,
    reason="the built-in table is that of torch 2.13",
)
def test_the_built_in_table_is_the_header_of_its_torch() -> None:
    assert installed_lists(TORCH) == BUILT_IN


MINIATURE = r"""
#define AT_FORALL_LOWER_PRECISION_FP(_) \
  _(mm)                                 \
  _(conv_transpose2d, input)

#define AT_FORALL_FP32(_) \
  _(exp)                  \
  _(pow, Tensor_Scalar)

#define AT_FORALL_FP32_SET_OPT_DTYPE(_) \
  _(sum)

#define AT_FORALL_PROMOTE(_) _(dot)
"""


def test_an_entry_with_an_overload_is_named_with_a_dot() -> None:
    lists = lists_of_header(MINIATURE)
    assert dict(lists or {}) == {
        "LOWER_PRECISION_FP": {"mm", "conv_transpose2d.input"},
        "FP32": {"exp", "pow.Tensor_Scalar"},
        "FP32_SET_OPT_DTYPE": {"sum"},
        "PROMOTE": {"dot"},
    }


@pytest.mark.parametrize("text", [None, "#pragma once\n", MINIATURE.replace("AT_FORALL_PROMOTE", "AT_FORALL_WIDEST")])
def test_where_no_header_or_none_of_this_form_is_the_built_in_table_serves(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        header = tmp_path / "include" / "ATen" / "autocast_mode.h"
        header.parent.mkdir(parents=True)
        header.write_text(text, encoding="utf-8")
    assert installed_lists(tmp_path) is BUILT_IN
