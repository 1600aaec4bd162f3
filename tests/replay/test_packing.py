"""Values as JSON and tensors: what comes back is what went in, and nothing of it is code."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from ampdbg.replay.packing import PackedError, Packing, Unpacking, packed_random_state, unpacked_random_state
from ampdbg.replay.random_state import RandomState

CPU = torch.device("cpu")

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.binary(max_size=5)
    | st.just("\ud800 half of a pair")
    | st.floats()
    | st.text()
    | st.complex_numbers(allow_nan=False)
    | st.just(torch.float16)
    | st.builds(slice, st.integers(0, 9), st.integers(0, 9), st.none())
    | st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def again(value: Any, live: Any = None) -> Any:
    """The value, through the bytes of a file."""
    packing = Packing("value")
    packed = json.loads(json.dumps(packing.of(value), allow_nan=False))
    return Unpacking(load(save(packing.tensors)), CPU).of(packed, live)


def same(one: Any, other: Any) -> bool:
    """Whether they are equal, with NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(VALUES)
@settings(deadline=None)
def test_plain_values_come_back(value: Any) -> None:
    assert same(again(value), value)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(3).to(dtype)
    found = again({"x": [tensor, tensor], "y": tensor.t() if tensor.dim() == 2 else tensor})
    assert found["x"][0] is found["x"][1]
    assert found["x"][0].dtype is dtype
    assert torch.equal(found["x"][0], tensor)
    assert torch.equal(found["y"], tensor.t() if tensor.dim() == 2 else tensor)


def test_infinities_nan_and_gradients_come_back() -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.nan, -0.0], requires_grad=True)
    found = again(tensor)
    assert found.requires_grad
    assert found.is_leaf
    assert found.detach().numpy().tobytes() == tensor.detach().numpy().tobytes()


@pytest.mark.parametrize("array", [numpy.arange(6).reshape(2, 3), numpy.float32(0.1), numpy.array([1.5, math.nan])])
def test_arrays_come_back(array: Any) -> None:
    found = again([array])[0]
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert numpy.array_equal(found, array, equal_nan=True)


Pair = namedtuple("Pair", "one other")


@dataclass
class Batch:
    """An object of the user's own."""

    x: torch.Tensor
    name: str


def test_objects_take_the_captured_values_into_what_is_at_hand() -> None:
    there, here = torch.ones(2), torch.zeros(3)
    for value, live in [
        (Batch(there, "then"), Batch(here, "now")),
        (UserDict({"x": there, "name": "then"}), UserDict({"x": here, "name": "now"})),
        (OrderedDict(x=there, name="then"), OrderedDict(x=here, name="now")),
        (Pair(there, "then"), Pair(here, "now")),
    ]:
        found = again([value], [live])[0]
        assert type(found) is type(live)
        values = vars(found).get("data", vars(found)) if not isinstance(found, (dict, tuple)) else found
        parts = list(values.values()) if isinstance(values, dict) else list(values)
        assert torch.equal(parts[0], there)
        assert parts[1] == "then"
    assert torch.equal(here, torch.zeros(3))


@pytest.mark.parametrize(("value", "live"), [(object(), None), (Batch(torch.ones(1), ""), None), (print, 3)])
def test_what_is_not_at_hand_is_refused(value: Any, live: Any) -> None:
    with pytest.raises(PackedError, match="at hand"):
        again([value], [live])


HOSTILE = [
    {},
    [],
    {"eval": "1"},
    {"dtype": "load"},
    {"list": 3},
    {"live": "os.system"},
    {"like": "os.system", "inner": []},
]


@pytest.mark.parametrize("packed", HOSTILE, ids=str)
def test_what_nobody_packed_is_refused(packed: Any) -> None:
    with pytest.raises(PackedError):
        Unpacking({}, CPU).of(packed)


def test_the_random_state_comes_back() -> None:
    before = RandomState.now()
    packing = Packing("value")
    packed = json.loads(json.dumps(packed_random_state(before, packing)))
    drawn = torch.rand(3), numpy.random.rand(3)
    unpacked_random_state(packed, Unpacking(load(save(packing.tensors)), CPU)).restore()
    assert torch.equal(torch.rand(3), drawn[0])
    assert numpy.array_equal(numpy.random.rand(3), drawn[1])


def damaged_words(packing: Packing, state: list[Any]) -> None:
    words = next(tensor for tensor in packing.tensors.values() if len(tensor) == 625)
    words[7] = -1


def damaged_torch(packing: Packing, state: list[Any]) -> None:
    words = next(tensor for tensor in packing.tensors.values() if tensor.dtype is torch.uint8)
    words.fill_(7)


def damaged_gauss(packing: Packing, state: list[Any]) -> None:
    state[0]["list"][2] = "often"


@pytest.mark.parametrize("damage", [damaged_words, damaged_torch, damaged_gauss])
def test_a_damaged_random_state_is_refused_before_it_is_used(damage: Callable[[Packing, list[Any]], None]) -> None:
    packing = Packing("value")
    packed = json.loads(json.dumps(packed_random_state(RandomState.now(), packing)))
    damage(packing, packed["list"])
    before = RandomState.now()
    with pytest.raises(PackedError, match=r"damaged: its random state: [^\n]+$"):
        unpacked_random_state(packed, Unpacking(load(save(packing.tensors)), CPU))
    assert (random.getstate(), torch.get_rng_state().tolist()) == (before.python, before.cpu.tolist())
