"""Tests of the base names of ops."""

import pytest

from ampdbg.ops import base_name


@pytest.mark.parametrize(
    ("op", "name"),
    [("aten.mul_.Tensor", "mul"), ("aten._softmax.default", "_softmax"), ("mul", "mul"), ("", ""), (".", "")],
)
def test_an_op_has_a_base_name_even_in_a_damaged_record(op: str, name: str) -> None:
    assert base_name(op) == name
