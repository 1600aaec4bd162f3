"""A replay starts with the batch before its step: copied in memory, or packed as JSON and tensors without code."""

import json
import math
import random
import sys
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.replay.copies import altered_batch, duplicate
from ampdbg.replay.packing import PackedError, Packing, Unpacking, packed_random_state, unpacked_random_state
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import prepared
from ampdbg.replay.snapshot import take_snapshot
from ampdbg.replay.state import OBJECTS_IN_A_BATCH
from ampdbg.training.loop import train
from tests.written import written

WORKLOAD = """
import torch

def data():
    return [{"x": torch.randn(4, 2), "more": [torch.randn(4, 1)]} for _ in range(3)]

def step(model, batch):
    y = batch["more"].pop()
    x = batch.pop("x").mul_(0.5)
    x[0] = 1.0
    return (model(x) - y).square().mean()
"""

LINEAR = ("torch.nn:Linear", {"in_features": 2, "out_features": 1})
Pair = namedtuple("Pair", ["one", "other"])


class Tokens(UserDict[str, Any]):
    """A mapping type of a library, such as tokenizers return."""


@dataclass(frozen=True)
class Graph:
    """A frozen object that holds tensors and another object."""

    x: torch.Tensor = field(default_factory=lambda: torch.ones(2))
    edges: Any = None


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a tensor": (lambda: torch.ones(2), lambda batch: batch.div_(10)),
    "a key": (lambda: {"x": torch.ones(2), "y": 1}, lambda batch: batch.pop("y")),
    "a nested list": (lambda: ({"x": [torch.ones(1)]},), lambda batch: batch[0]["x"].append(2)),
    "a tensor of a named tuple": (lambda: Pair(torch.ones(2), [1]), lambda batch: batch.one.add_(1)),
    "the order of a dict": (lambda: OrderedDict(a=1, b=2), lambda batch: batch.move_to_end("a")),
    "an array": (lambda: [np.ones(2)], lambda batch: batch[0].fill(7)),
    "a mapping of a library's": (lambda: Tokens(x=torch.ones(2)), lambda batch: batch.pop("x")),
    "a frozen object": (Graph, lambda batch: batch.x.mul_(2)),
    "an object in an object": (lambda: Graph(edges=Graph()), lambda batch: batch.edges.x.mul_(2)),
    "a sparse tensor": (lambda: [torch.eye(2).to_sparse()], lambda batch: batch[0].mul_(2)),
    "a tensor that wants gradients": (lambda: [torch.ones(2, requires_grad=True)], lambda batch: batch[0].data.mul_(2)),
}


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.requires_grad, value.detach().to_dense().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, described(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(one) for one in value]
    return (type(value), described(vars(value))) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("what", CHANGES)
def test_a_duplicate_does_not_change_with_its_batch(what: str) -> None:
    make, change = CHANGES[what]
    batch = make()
    before, kept = described(batch), duplicate(batch)
    change(batch)
    assert described(kept) == before
    assert described(batch) != before


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_replay_starts_with_the_batch_before_the_step(accumulate: int, tmp_path: Path) -> None:
    with prepared(written(tmp_path, WORKLOAD, model=LINEAR, data="data", step="step")) as run:
        every = run.workload.batches()
        batches = tuple(next(every) for _ in range(accumulate))
        snapshot = take_snapshot(run.workload.model, 0, batches)
        loss = sum(float(run.workload.losses(batch)["loss"].detach()) for batch in batches) / accumulate
        ended = described(batches)
        replays = [replay_step(run, snapshot, Manner(dtype)).replay for dtype in ("float32", "float64", "float32")]
        assert [replay.error for replay in replays] == [""] * 3
        assert [replay.loss for replay in replays] == pytest.approx([loss] * 3, rel=1e-6)
        assert described(batches) == ended


OUT_OF_RANGE = """
import torch

def data():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, 2, generator=generator) for _ in range(9)]
    batches[4] *= 1e6
    return batches

def step(model, batch):
    return model(batch).float().tanh().square().mean()
"""


@pytest.mark.parametrize("accumulate", [1, 3])
def test_any_micro_batch_beyond_float16_is_a_data_range_finding(accumulate: int, tmp_path: Path) -> None:
    train_keys, precision = {"steps": 9 // accumulate, "accumulate": accumulate}, {"dtype": "float16"}
    keys = {"model": LINEAR, "data": "data", "step": "step", "precision": precision, "train": train_keys}
    found = diagnose(train(written(tmp_path, OUT_OF_RANGE, **keys))).findings[0]
    assert (found.code, found.step) == ("data-range", 4 // accumulate)


PENALTY = """
import torch

def data():
    return [torch.randn(4, 2, requires_grad=True) for _ in range(3)]

def step(model, x):
    y = model(x)
    slope, = torch.autograd.grad(y.sum(), x, create_graph=True)
    return slope.square().mean() + y.square().mean()
"""


@pytest.mark.parametrize("manner", [Manner("float64"), Manner("float32", rounds_to="float16"), Manner("bfloat16")])
def test_a_batch_that_requires_grad_is_a_leaf_in_every_replay(manner: Manner, tmp_path: Path) -> None:
    with prepared(written(tmp_path, PENALTY, model=LINEAR, data="data", step="step")) as run:
        (batch,) = batches = (next(run.workload.batches()),)
        snapshot = take_snapshot(run.workload.model, 0, batches)
        fp32 = replay_step(run, snapshot, Manner("float32")).replay
        replay = replay_step(run, snapshot, manner).replay
        assert replay.error == fp32.error == ""
        assert (replay.loss, replay.grad_norm) == pytest.approx((fp32.loss, fp32.grad_norm), rel=2e-2)
        assert altered_batch(batch, manner.altered).is_leaf


def test_a_duplicate_keeps_an_object_shared_by_two_keys_shared() -> None:
    rows = [torch.ones(2)]
    kept = duplicate({"one": rows, "other": rows})
    assert kept["one"] is kept["other"] is not rows


def test_a_duplicate_stores_an_expanded_row_once() -> None:
    kept = duplicate(torch.ones(1, 2).expand(1000, 2))
    assert kept.shape == (1000, 2)
    assert kept.untyped_storage().nbytes() == 8


def test_a_duplicate_shares_values_nested_too_deep_to_copy() -> None:
    rows: Any = torch.zeros(10)
    deep = rows
    for _ in range(OBJECTS_IN_A_BATCH + 1):
        deep = Graph(edges=deep)
    kept = duplicate(deep)
    for _ in range(OBJECTS_IN_A_BATCH + 1):
        kept = kept.edges
    assert kept is rows


def test_a_duplicate_shares_values_that_cannot_be_copied() -> None:
    numbers = (number for number in range(3))
    batch = {"numbers": numbers, "call": len}
    assert duplicate(batch) == batch
    assert duplicate(batch) is not batch


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


def packed_and_unpacked(value: Any, live: Any = None) -> Any:
    """The value, packed to the bytes of a file and unpacked."""
    packing = Packing("value")
    packed = json.loads(json.dumps(packing.of(value), allow_nan=False))
    return Unpacking(load(save(packing.tensors)), CPU).of(packed, live)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with NaN equal to itself."""
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
def test_plain_values_survive_packing(value: Any) -> None:
    assert same(packed_and_unpacked(value), value)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_tensors_survive_packing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(3).to(dtype)
    found = packed_and_unpacked({"x": [tensor, tensor], "y": tensor.t() if tensor.dim() == 2 else tensor})
    assert found["x"][0] is found["x"][1]
    assert found["x"][0].dtype is dtype
    assert torch.equal(found["x"][0], tensor)
    assert torch.equal(found["y"], tensor.t() if tensor.dim() == 2 else tensor)


def test_infinities_nan_and_requires_grad_survive_packing() -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.nan, -0.0], requires_grad=True)
    found = packed_and_unpacked(tensor)
    assert found.requires_grad
    assert found.is_leaf
    assert found.detach().numpy().tobytes() == tensor.detach().numpy().tobytes()


def test_an_unpacked_string_is_interned() -> None:
    name = "".join(["conv", "2d"])  # not an interned constant
    assert packed_and_unpacked([name])[0] is sys.intern("conv2d")


@pytest.mark.parametrize("array", [numpy.arange(6).reshape(2, 3), numpy.float32(0.1), numpy.array([1.5, math.nan])])
def test_numpy_arrays_and_scalars_survive_packing(array: Any) -> None:
    found = packed_and_unpacked([array])[0]
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert numpy.array_equal(found, array, equal_nan=True)


@dataclass
class Batch:
    """A user's object."""

    x: torch.Tensor
    name: str


def test_captured_values_are_unpacked_into_the_types_of_the_live_objects() -> None:
    there, here = torch.ones(2), torch.zeros(3)
    for value, live in [
        (Batch(there, "then"), Batch(here, "now")),
        (UserDict({"x": there, "name": "then"}), UserDict({"x": here, "name": "now"})),
        (OrderedDict(x=there, name="then"), OrderedDict(x=here, name="now")),
        (Pair(there, "then"), Pair(here, "now")),
    ]:
        found = packed_and_unpacked([value], [live])[0]
        assert type(found) is type(live)
        values = vars(found).get("data", vars(found)) if not isinstance(found, (dict, tuple)) else found
        parts = list(values.values()) if isinstance(values, dict) else list(values)
        assert torch.equal(parts[0], there)
        assert parts[1] == "then"
    assert torch.equal(here, torch.zeros(3))


@pytest.mark.parametrize(("value", "live"), [(object(), None), (Batch(torch.ones(1), ""), None), (print, 3)])
def test_unpacking_refuses_an_object_without_a_live_counterpart(value: Any, live: Any) -> None:
    with pytest.raises(PackedError, match="this script has a"):
        packed_and_unpacked([value], [live])


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
def test_unpacking_refuses_unknown_or_malicious_data(packed: Any) -> None:
    with pytest.raises(PackedError):
        Unpacking({}, CPU).of(packed)


def test_the_random_state_survives_packing() -> None:
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
def test_a_damaged_random_state_is_refused_before_its_use(damage: Callable[[Packing, list[Any]], None]) -> None:
    packing = Packing("value")
    packed = json.loads(json.dumps(packed_random_state(RandomState.now(), packing)))
    damage(packing, packed["list"])
    before = RandomState.now()
    with pytest.raises(PackedError, match=r"damaged: its random state: [^\n]+$"):
        unpacked_random_state(packed, Unpacking(load(save(packing.tensors)), CPU))
    assert (random.getstate(), torch.get_rng_state().tolist()) == (before.python, before.cpu.tolist())
