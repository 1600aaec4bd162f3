"""A replay starts with the batch as the step found it, whatever the step did to it; the run sees its own batches."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.replay.copies import altered_batch, duplicate
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
    """A mapping of a library's own, as tokenizers return it."""


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
def test_a_duplicate_does_not_change_with_the_batch(what: str) -> None:
    make, change = CHANGES[what]
    batch = make()
    before, kept = described(batch), duplicate(batch)
    change(batch)
    assert described(kept) == before
    assert described(batch) != before


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_replay_starts_with_the_batch_as_the_step_found_it(accumulate: int, tmp_path: Path) -> None:
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
def test_a_micro_batch_beyond_half_is_the_datas_fault_whichever_of_them_it_is(accumulate: int, tmp_path: Path) -> None:
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
def test_a_batch_that_needs_gradients_is_a_leaf_in_every_replay(manner: Manner, tmp_path: Path) -> None:
    with prepared(written(tmp_path, PENALTY, model=LINEAR, data="data", step="step")) as run:
        (batch,) = batches = (next(run.workload.batches()),)
        snapshot = take_snapshot(run.workload.model, 0, batches)
        fp32 = replay_step(run, snapshot, Manner("float32")).replay
        replay = replay_step(run, snapshot, manner).replay
        assert replay.error == fp32.error == ""
        assert (replay.loss, replay.grad_norm) == pytest.approx((fp32.loss, fp32.grad_norm), rel=2e-2)
        assert altered_batch(batch, manner.altered).is_leaf


def test_what_two_leaves_share_stays_shared() -> None:
    rows = [torch.ones(2)]
    kept = duplicate({"one": rows, "other": rows})
    assert kept["one"] is kept["other"] is not rows


def test_a_repeated_row_is_copied_once() -> None:
    kept = duplicate(torch.ones(1, 2).expand(1000, 2))
    assert kept.shape == (1000, 2)
    assert kept.untyped_storage().nbytes() == 8


def test_a_batch_that_leads_to_the_data_set_does_not_carry_it() -> None:
    rows: Any = torch.zeros(10)
    deep = rows
    for _ in range(OBJECTS_IN_A_BATCH + 1):
        deep = Graph(edges=deep)
    kept = duplicate(deep)
    for _ in range(OBJECTS_IN_A_BATCH + 1):
        kept = kept.edges
    assert kept is rows


def test_what_cannot_be_copied_is_shared() -> None:
    numbers = (number for number in range(3))
    batch = {"numbers": numbers, "call": len}
    assert duplicate(batch) == batch
    assert duplicate(batch) is not batch
