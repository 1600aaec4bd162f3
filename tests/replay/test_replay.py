"""Replays leave no trace, run wider than the code asks for, and are bounded in number."""

from __future__ import annotations

import gc
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.precision.widening import lifted
from ampdbg.probes.producer_trace import ProducerTrace, SampleTrace
from ampdbg.record.run import Record
from ampdbg.replay.investigation import Why, investigate
from ampdbg.replay.replay import Manner, continued_in_fp32, replay_step
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import ModelState, Snapshot, take_snapshot
from ampdbg.training.loop import train
from tests.observing import observing
from tests.written import written

WORKLOAD = """
import random
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, factor=1.0, raises_in=None, half=False):
        super().__init__()
        self.factor, self.raises_in, self.half = factor, raises_in, half
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1  # registered again as a new tensor
        h = self.body(x)
        if str(h.dtype) == self.raises_in:
            raise TypeError("not made for this dtype")
        h = F.dropout(self.norm(h), 0.3, self.training) * (random.random() + float(np.random.rand()))
        if self.half:
            h = h.half()
        return (self.head(h) * self.factor).squeeze(-1)

def data():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(16, 4, generator=generator), torch.randn(16, generator=generator)) for _ in range(5)]

def loss(output, target):
    return F.mse_loss(output.float(), target)
"""


def config(folder: Path, *overrides: str, **keys: Any) -> Config:
    return written(folder, WORKLOAD, *overrides, model=("Net", keys), data="data", loss="loss")


def state(run: Run) -> list[Any]:
    """All that a replay could change, bit by bit."""
    model, [optimizer] = run.workload.model, run.workload.optimizers
    tensors = [(name, id(tensor), tensor.clone()) for name, tensor in model.named_parameters()]
    tensors += [(name, id(tensor), tensor.clone()) for name, tensor in model.named_buffers()]
    grads = [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    moments = [(key, id(v), v.clone()) for values in optimizer.state.values() for key, v in values.items()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    randomness = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
    return [tensors, grads, moments, groups, randomness, torch.get_default_dtype(), torch.is_autocast_enabled("cpu")]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))) and one.dtype is other.dtype
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def after_a_step(run: Run) -> Snapshot:
    """Trains one step and runs the forward and backward pass of the next, as the loop does before it replays."""
    [optimizer] = run.workload.optimizers
    batches = run.workload.batches()
    for number in range(2):
        optimizer.zero_grad(set_to_none=True)
        batch = next(batches)
        snapshot = take_snapshot(run.workload.model, number, (batch,))
        with torch.autocast(run.device.type, dtype=torch.float16):
            loss = run.workload.losses(batch)["loss"]
        loss.backward()
        if number == 0:
            optimizer.step()
    return snapshot


MANNERS = [
    Manner("float16", 1024.0, is_lifted=False),
    Manner("float32"),
    Manner("float32", rounds_to="float16"),
    Manner("float32", rounds_to="float16", draw=1),
    Manner("bfloat16"),
    Manner("float64"),
]


@pytest.mark.parametrize("raises_in", [None, "torch.float16", "torch.float32", "torch.float64"])
def test_a_replay_leaves_no_trace(tmp_path: Path, raises_in: str | None) -> None:
    with prepared(config(tmp_path)) as run:
        snapshot = after_a_step(run)
        before = state(run)
        run.workload.model.raises_in = raises_in  # type: ignore[assignment]
        snapshot = replace(snapshot, state=ModelState.now(run.workload.model))
        failed = set()
        for manner in MANNERS:
            for traced in (None, ProducerTrace, SampleTrace):
                made = replay_step(run, snapshot, manner, traced=traced, keep_gradients=True)
                failed |= {manner.dtype} if made.replay.error else set()
                assert same(state(run), before), manner
        continued_in_fp32(run, snapshot, 3)
        assert same(state(run), before)
    assert failed == ({raises_in[len("torch.") :]} if raises_in else set())


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("raises_in", [None, "torch.float32"])
def test_python_looks_for_cycles_after_a_replay_as_before_it(
    tmp_path: Path, raises_in: str | None, collects: bool
) -> None:
    with prepared(config(tmp_path)) as run:
        snapshot = after_a_step(run)
        run.workload.model.raises_in = raises_in  # type: ignore[assignment]
        snapshot = replace(snapshot, state=ModelState.now(run.workload.model))
        try:
            (gc.enable if collects else gc.disable)()
            made = replay_step(run, snapshot, Manner("float32"))
            assert gc.isenabled() is collects
        finally:
            gc.enable()
    assert bool(made.replay.error) == bool(raises_in)


def test_a_replay_as_it_was_is_the_step_itself(tmp_path: Path) -> None:
    with prepared(config(tmp_path)) as run:
        snapshot = after_a_step(run)
        gradients = {name: p.grad.clone() for name, p in run.workload.model.named_parameters() if p.grad is not None}
        made = replay_step(run, snapshot, Manner("float16", 1.0, is_lifted=False), keep_gradients=True)
        assert same(sorted(made.gradients.items()), sorted(gradients.items()))


@pytest.mark.parametrize(("why", "is_run"), [("loss", False), ("gradients", True)])
def test_behind_a_loss_that_is_not_finite_no_backward_pass_is_run(tmp_path: Path, why: Why, is_run: bool) -> None:
    with prepared(config(tmp_path, factor=1e6)) as run:
        low = investigate(
            run, after_a_step(run), why, 1024.0, before=(), weights_grew=1.0, observer=observing()
        ).replays[0]
        assert not math.isfinite(low.loss)
        assert math.isnan(low.grad_norm)
        assert bool(low.gradients) == is_run


@pytest.mark.parametrize("why", ["loss", "gradients", "end"])
def test_an_interrupt_in_a_replay_leaves_no_trace(tmp_path: Path, why: Why) -> None:
    def interrupt(step: int, doing: str) -> None:
        if doing == "FP32":
            raise KeyboardInterrupt

    with prepared(config(tmp_path, factor=1e6)) as run:
        snapshot = after_a_step(run)
        before = state(run)
        with pytest.raises(KeyboardInterrupt):
            investigate(run, snapshot, why, 1024.0, before=(), weights_grew=1.0, observer=observing(replay=interrupt))
        assert same(state(run), before)


def test_the_number_of_replayed_steps_is_bounded(tmp_path: Path) -> None:
    said: list[int] = []
    record = train(
        config(tmp_path, "train.steps=40", factor=1e6), observer=observing(replay=lambda step, doing: said.append(step))
    )
    assert len(set(said)) == len(record.investigations) <= 2
    assert len(said) < 30


def test_a_replay_in_fp32_is_wider_than_the_code_asks_for(tmp_path: Path) -> None:
    with prepared(config(tmp_path, half=True, factor=3e5)) as run:
        snapshot = take_snapshot(run.workload.model, 0, (next(run.workload.batches()),))
        low = replay_step(run, snapshot, Manner("float16", is_lifted=False)).replay
        assert not math.isfinite(low.loss)
        for dtype in ("bfloat16", "float32", "float64"):
            assert math.isfinite(replay_step(run, snapshot, Manner(dtype)).replay.loss), dtype


class SlowToRestore(random.Random):
    """A generator of random numbers that takes its time to be put into a state."""

    def setstate(self, state: Any) -> None:
        time.sleep(0.2)
        super().setstate(state)


def test_the_time_of_a_replay_is_that_of_its_passes(tmp_path: Path) -> None:
    with prepared(config(tmp_path)) as run:
        run.workload.model.register_forward_hook(lambda *args: time.sleep(0.05))
        run.workload.model.generator = SlowToRestore(1)  # type: ignore[assignment]
        snapshot = take_snapshot(run.workload.model, 0, (next(run.workload.batches()),))
        started = time.perf_counter()
        seconds = replay_step(run, snapshot, Manner("float32")).seconds
        assert time.perf_counter() - started - seconds >= 0.2
        assert seconds >= 0.05


def test_lifting_reaches_casts_new_tensors_and_autocast() -> None:
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with lifted("float32"), torch.autocast("cpu", dtype=torch.bfloat16):
        made = [x.half(), x.to(torch.bfloat16), torch.zeros(2, dtype=torch.half), linear(x), x.double()]
    assert [tensor.dtype for tensor in made] == [torch.float32] * 4 + [torch.float64]
    assert x.half().dtype is torch.float16
    with lifted("float64"):
        assert x.float().dtype is torch.float32  # no cast is needed, so none is made
        assert torch.zeros(2).dtype is torch.float64
    assert torch.zeros(2).dtype is torch.float32


def test_lifting_is_undone_when_the_code_raises() -> None:
    with pytest.raises(ZeroDivisionError), lifted("float64"):
        raise ZeroDivisionError
    assert torch.zeros(1).dtype is torch.float32


def test_without_replays_the_cause_is_unknown(tmp_path: Path) -> None:
    record: Record = diagnose(train(config(tmp_path, "train.steps=8", factor=1e6), replays=0))
    assert record.findings[0].code == "unknown"
    assert record.verdict == "inconclusive"
