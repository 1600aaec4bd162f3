"""What counts as data, how data restarts at its end, and how batches move to the device."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ampdbg.errors import WorkloadError
from ampdbg.workload.batches import tensor_leaves, to_device
from ampdbg.workload.build import Workload
from tests.workload.folders import CPU, build

META = torch.device("meta")


def taken(workload: Workload, count: int) -> list[Any]:
    """The first ``count`` batches."""
    stream = workload.batches()
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize(
    "source",
    [
        "data = [1, 2, 3]",
        "def data(): return [1, 2, 3]",
        "def data(): yield from [1, 2, 3]",
        "def data(): return iter([1, 2, 3])",
        "data = lambda: [1, 2, 3]",
        "import functools\ndata = functools.partial(list, [1, 2, 3])",
        "data = torch.utils.data.DataLoader([1, 2, 3], batch_size=None)",
        "class data:\n    def __iter__(self): return iter([1, 2, 3])",
        "class data:\n    def __getitem__(self, i): return [1, 2, 3][i]",
        "class data(torch.utils.data.IterableDataset):\n    def __iter__(self): return iter([1, 2, 3])",
        "class data:\n    def setup(self): self.made = [1, 2, 3]\n    def train_dataloader(self): return self.made",
        "class Module:\n    def train_dataloader(self): return [1, 2, 3]\ndata = Module()",
        "class Module:\n    def train_dataloader(self): return [1, 2, 3]\ndef data(): return Module()",
    ],
)
def test_data_restarts_in_every_call_and_at_its_end(tmp_path: Path, source: str) -> None:
    workload = build(tmp_path, "data.target=data.py:data", data=f"import torch\n{source}\n")
    assert [taken(workload, 2), taken(workload, 7)] == [[1, 2], [1, 2, 3, 1, 2, 3, 1]]


def test_a_one_shot_iterator_that_ends_raises_a_workload_error(tmp_path: Path) -> None:
    workload = build(tmp_path, "data.target=data.py:data", data="data = iter([1, 2, 3])\n")
    stream = workload.batches()
    assert [next(stream) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(WorkloadError, match="ended after 3 batches and cannot be started again"):
        next(stream)


def test_a_data_module_is_prepared_as_lightning_does(tmp_path: Path) -> None:
    source = """
        class Module:
            def __init__(self, size):
                self.calls = [size]
            def prepare_data(self):
                self.calls.append("prepare_data")
            def setup(self, stage):
                self.calls.append(f"setup {stage}")
            def train_dataloader(self):
                return [tuple(self.calls)]
    """
    workload = build(tmp_path, "data={target: data.py:Module, args: {size: 4}}", data=source)
    assert taken(workload, 1) == [(4, "prepare_data", "setup fit")]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("data = 'text'", "is a str; needed: an iterable of batches"),
        ("data = {'x': 1}", "is a dict, which looks like one batch"),
        ("import torch\ndata = torch.ones(3)", "is a Tensor, which looks like one batch"),
        ("import torch\ndata = torch.nn.Parameter(torch.ones(3)), torch.ones(3)", "is a tuple, which looks like one"),
        ("def data(): return None", "returned None; needed: an iterable of batches"),
        ("class data: pass", "returned a data; needed: an iterable of batches"),
        ("class data:\n    def train_dataloader(self): return None", "returned None; needed"),
    ],
)
def test_data_that_is_not_an_iterable_of_batches_is_refused(tmp_path: Path, source: str, problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        build(tmp_path, "data.target=data.py:data", data=source + "\n")


def test_no_batch_is_kept_alive_past_its_step(tmp_path: Path) -> None:
    workload = build(
        tmp_path, "data.target=data.py:data", data="import torch\ndef data():\n    while True: yield torch.ones(1)\n"
    )
    stream = workload.batches()
    batch = next(stream)
    first = weakref.ref(batch)
    batch = next(stream)
    assert first() is None


# --- to the device ---


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    made: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Output(collections.OrderedDict[str, torch.Tensor]):
    """A dataclass and a dict, like the outputs of transformers' models."""

    logits: torch.Tensor

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class Encoding(collections.UserDict[str, torch.Tensor]):
    """Moves itself in place, like transformers' BatchEncoding."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class InPlace:
    def __init__(self) -> None:
        self.device = CPU

    def to(self, device: torch.device) -> None:
        self.device = device


class Items(list[torch.Tensor]):
    pass


T = torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        T,
        (T, [T, {"x": T}]),
        Pair(T, T),
        Frozen(T, "a"),
        {"x": {"y": (T,)}},
        collections.OrderedDict(b=T, a=T),
        collections.defaultdict(lambda: T, x=T),
        collections.UserDict({"x": T}),
        Encoding({"x": T}),
        Items([T]),
    ],
)
def test_to_device_moves_every_tensor_and_keeps_every_container(batch: Any) -> None:
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert not isinstance(moved, Frozen) or (moved.name, moved.made) == ("a", 3)
    before, after = list(tensor_leaves(batch)), list(tensor_leaves(moved))
    assert [path for path, _ in after] == [path for path, _ in before] != []
    assert {leaf.device for _, leaf in after} == {META}


def test_to_device_does_not_change_the_containers_of_the_user() -> None:
    inner, items = {"x": T}, [T]
    to_device([inner, items], META)
    assert inner["x"] is T
    assert items[0] is T


def test_to_device_calls_the_to_method_of_objects_and_keeps_other_values() -> None:
    item, others = InPlace(), ["text", 3, None, Frozen, {4}]
    assert to_device([item, *others], META) == [item, *others]
    assert item.device == META
    assert isinstance(to_device(pack_sequence([T]), CPU), PackedSequence)


def test_tensor_leaves_are_named_by_their_path() -> None:
    batch = ({"ids": T, 3: [T]}, Frozen(T, "a"), "text")
    assert [path for path, _ in tensor_leaves(batch)] == ["[0]['ids']", "[0][3][0]", "[1].x"]
    assert [path for path, _ in tensor_leaves(T)] == [""]
    assert [path for path, _ in tensor_leaves(Output(T))] == ["['logits']"]


def test_a_leaf_that_requires_grad_is_a_leaf_on_the_device() -> None:
    leaf = torch.ones(2, requires_grad=True)
    (moved,) = to_device([leaf], META)
    assert (moved.device, moved.is_leaf, moved.requires_grad) == (META, True, True)
    (made,) = to_device([leaf * 2], META)
    assert (made.is_leaf, made.requires_grad) == (False, True)  # its gradient flows to the leaf
