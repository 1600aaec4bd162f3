"""Tests of counting inf and NaN in batches, parameters and buffers."""

import dataclasses
import math
from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.probes.tensors import (
    hold_values,
    is_finite,
    magnitude_of,
    may_be_bad,
    nonfinite_in_batch,
    nonfinite_in_model,
    scalar_of,
    to_host,
)
from ampdbg.record.run import TensorCounts

ANY_FLOAT = st.floats(width=16, allow_nan=True, allow_infinity=True)


def counts(tensor: torch.Tensor) -> tuple[int, int]:
    magnitude = magnitude_of(tensor)
    return magnitude.inf, magnitude.nan


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(values=st.lists(ANY_FLOAT, max_size=40), dtype=st.sampled_from(DTYPES))
def test_counts_of_inf_and_nan_agree_with_python(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    inf, nan = sum(map(math.isinf, values)), sum(map(math.isnan, values))
    assert counts(tensor) == (inf, nan)
    assert is_finite(tensor) == (inf + nan == 0)


def test_zeros_hold_no_values_and_nan_is_a_value() -> None:
    zeros = [torch.zeros(3), -torch.zeros(2, dtype=torch.float16), torch.zeros(0), torch.zeros(2).to_sparse()]
    assert not hold_values([])
    assert not hold_values(zeros)
    for value in (1e-45, -1.0, math.inf, math.nan):
        assert hold_values([*zeros, torch.tensor([0.0, value])])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3),
        torch.tensor([True]),
        torch.empty(0),
        torch.tensor([1.0]).to(torch.float8_e4m3fn),
        torch.zeros(2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.tensor([1 + 2j]),
    ],
)
def test_every_kind_of_tensor_can_be_counted(tensor: torch.Tensor) -> None:
    assert is_finite(tensor)
    assert counts(tensor) == (0, 0)


def test_inf_and_nan_in_complex_and_sparse_tensors_are_seen() -> None:
    assert counts(torch.tensor([complex(math.inf, math.nan)])) == (1, 1)
    assert not is_finite(torch.tensor([[0.0, math.nan]]).to_sparse_csr())


def test_the_leaf_and_the_sample_of_a_bad_batch_are_named() -> None:
    images = torch.zeros(4, 2, 2)
    images[3, 1, 0] = math.nan
    images[3, 1, 1] = math.inf
    batch = {"pixels": images, "labels": torch.arange(4), "name": "x"}
    assert nonfinite_in_batch(batch) == (TensorCounts("batch", "['pixels']", 1, 1, 16, (3, 1, 0), dtype="float32"),)
    assert nonfinite_in_batch((torch.zeros(2), [torch.tensor([math.inf])])) == (
        TensorCounts("batch", "[1][0]", 1, 0, 1, (0,), dtype="float32"),
    )
    assert nonfinite_in_batch(torch.ones(3)) == ()
    nan = torch.tensor([math.nan])
    kind = dataclasses.make_dataclass("Batch", ["pixels"])
    assert [one.name for one in nonfinite_in_batch((UserDict(x=nan), kind(nan)))] == ["[0]['x']", "[1].pixels"]


@pytest.mark.parametrize(
    ("values", "is_bad"),
    [
        ([0.0, -math.inf], False),  # a mask
        ([-math.inf, -math.inf], False),
        ([1.0, -math.inf, 1.0], False),
        ([0.5, -math.inf, 1.0], True),  # data, such as the logarithm of 0
        ([0.0, math.inf], True),
        ([0.0, math.nan], True),
        ([0.0, 1.0], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e5m2])
def test_minus_infinity_beside_at_most_one_other_value_may_be_a_mask(
    values: list[float], is_bad: bool, dtype: torch.dtype
) -> None:
    assert may_be_bad(torch.tensor(values).to(dtype)) == is_bad


def test_bad_parameters_and_buffers_are_named() -> None:
    linear, norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    assert norm.running_var is not None
    model = torch.nn.Sequential(linear, norm)
    assert nonfinite_in_model(model) == ()
    with torch.no_grad():
        linear.bias[1] = math.nan
        norm.running_var[0] = math.inf
    assert [(found.kind, found.name) for found in nonfinite_in_model(model, "after")] == [
        ("parameter", "0.bias"),
        ("buffer", "1.running_var"),
    ]


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (torch.tensor(1.5), 1.5),
        (torch.tensor(1e300, dtype=torch.float64), 1e300),
        (torch.tensor(0.1, dtype=torch.bfloat16), float(torch.tensor(0.1, dtype=torch.bfloat16))),
        (torch.tensor([1.0, 2.0]), 3.0),
        (torch.tensor(7), 7.0),
        (torch.tensor(math.nan), math.nan),
    ],
)
def test_the_loss_is_read_with_its_value_before_a_later_write(tensor: torch.Tensor, value: float) -> None:
    read = scalar_of(tensor)
    tensor.zero_()
    assert to_host([read, torch.tensor(2.0), 3.0]) == pytest.approx([value, 2.0, 3.0], rel=1e-15, nan_ok=True)


def test_a_loss_that_has_a_graph_is_read_without_the_graph() -> None:
    weights = torch.ones(2, requires_grad=True)
    assert scalar_of(weights.sum()) == 2.0
    assert scalar_of(weights * 2) == 4.0
