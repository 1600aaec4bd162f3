"""Replays are few, leave the run unchanged, whatever a model writes in a pass, and run wider than its code asks for."""

import contextlib
import gc
import math
import random
import time
from collections.abc import Iterator
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
from tests.siblings import slow_except
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
    """Everything that a replay could change, for a bitwise comparison."""
    model, [optimizer] = run.workload.model, run.workload.optimizers
    tensors = [(name, id(tensor), tensor.clone()) for name, tensor in model.named_parameters()]
    tensors += [(name, id(tensor), tensor.clone()) for name, tensor in model.named_buffers()]
    grads = [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    moments = [(key, id(v), v.clone()) for values in optimizer.state.values() for key, v in values.items()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    randomness = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
    return [tensors, grads, moments, groups, randomness, torch.get_default_dtype(), torch.is_autocast_enabled("cpu")]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
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


RAISES_IN = [None, "torch.float16", "torch.float32", "torch.float64"]


@pytest.mark.parametrize("raises_in", slow_except([None, "torch.float32"], RAISES_IN))
def test_a_replay_leaves_model_optimizer_and_random_states_unchanged(tmp_path: Path, raises_in: str | None) -> None:
    with prepared(config(tmp_path)) as run:
        snapshot = after_a_step(run)
        before = state(run)
        run.workload.model.raises_in = raises_in  # type: ignore[assignment]
        snapshot = replace(snapshot, state=ModelState.now(run.workload.model))
        failed, refused = set(), set()
        for manner in MANNERS:
            for traced in (None, ProducerTrace, SampleTrace):
                made = replay_step(run, snapshot, manner, traced=traced, keep_gradients=True)
                failed |= {manner.dtype} if made.replay.error else set()
                refused |= {manner.dtype} if made.replay.refusal else set()
                assert same(state(run), before), manner
        continued_in_fp32(run, snapshot, 3)
        assert same(state(run), before)
    expected = {raises_in[len("torch.") :]} if raises_in else set()
    assert (failed, refused) == ((expected, set()) if raises_in == "torch.float16" else (set(), expected))


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("raises_in", [None, "torch.float32"])
def test_a_replay_leaves_garbage_collection_on_or_off(tmp_path: Path, raises_in: str | None, collects: bool) -> None:
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
    assert (made.replay.error, bool(made.replay.refusal)) == ("", bool(raises_in))


def test_a_replay_in_the_precision_of_the_step_repeats_its_gradients(tmp_path: Path) -> None:
    with prepared(config(tmp_path)) as run:
        snapshot = after_a_step(run)
        gradients = {name: p.grad.clone() for name, p in run.workload.model.named_parameters() if p.grad is not None}
        made = replay_step(run, snapshot, Manner("float16", 1.0, is_lifted=False), keep_gradients=True)
        assert same(sorted(made.gradients.items()), sorted(gradients.items()))


@pytest.mark.parametrize(("why", "is_run"), [("loss", False), ("gradients", True)])
def test_no_backward_pass_is_replayed_to_investigate_a_nonfinite_loss(tmp_path: Path, why: Why, is_run: bool) -> None:
    with prepared(config(tmp_path, factor=1e6)) as run:
        low = investigate(run, after_a_step(run), why, 1024.0, before=(), observer=observing()).low
        assert not math.isfinite(low.loss)
        assert math.isnan(low.grad_norm)
        assert bool(low.gradients) == is_run


@pytest.mark.parametrize("why", ["loss", "gradients", "end"])
def test_an_interrupt_in_a_replay_leaves_the_run_unchanged(tmp_path: Path, why: Why) -> None:
    def interrupt(step: int, doing: str) -> None:
        if doing == "FP32":
            raise KeyboardInterrupt

    with prepared(config(tmp_path, factor=1e6)) as run:
        snapshot = after_a_step(run)
        before = state(run)
        with pytest.raises(KeyboardInterrupt):
            investigate(run, snapshot, why, 1024.0, before=(), observer=observing(replay=interrupt))
        assert same(state(run), before)


def test_at_most_two_of_forty_failing_steps_are_investigated(tmp_path: Path) -> None:
    said: list[int] = []
    record = train(
        config(tmp_path, "train.steps=40", factor=1e6), observer=observing(replay=lambda step, doing: said.append(step))
    )
    assert len(set(said)) == len(record.investigations) <= 2
    assert len(said) < 30


def test_a_replay_in_a_wider_format_overrides_the_half_casts_of_the_model(tmp_path: Path) -> None:
    with prepared(config(tmp_path, half=True, factor=3e5)) as run:
        snapshot = take_snapshot(run.workload.model, 0, (next(run.workload.batches()),))
        low = replay_step(run, snapshot, Manner("float16", is_lifted=False)).replay
        assert not math.isfinite(low.loss)
        for dtype in ("bfloat16", "float32", "float64"):
            assert math.isfinite(replay_step(run, snapshot, Manner(dtype)).replay.loss), dtype


class SlowToRestore(random.Random):
    """A random number generator whose ``setstate`` is slow."""

    def setstate(self, state: Any) -> None:
        time.sleep(0.2)
        super().setstate(state)


def test_the_time_of_a_replay_excludes_the_restoring_of_states(tmp_path: Path) -> None:
    with prepared(config(tmp_path)) as run:
        run.workload.model.register_forward_hook(lambda *args: time.sleep(0.05))
        run.workload.model.generator = SlowToRestore(1)  # type: ignore[assignment]
        snapshot = take_snapshot(run.workload.model, 0, (next(run.workload.batches()),))
        started = time.perf_counter()
        seconds = replay_step(run, snapshot, Manner("float32")).seconds
        assert time.perf_counter() - started - seconds >= 0.2
        assert seconds >= 0.05


def test_lifted_widens_casts_new_tensors_and_autocast() -> None:
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with lifted("float32"), torch.autocast("cpu", dtype=torch.bfloat16):
        made = [x.half(), x.to(torch.bfloat16), torch.zeros(2, dtype=torch.half), linear(x), x.double()]
    assert [tensor.dtype for tensor in made] == [torch.float32] * 4 + [torch.float64]
    assert x.half().dtype is torch.float16
    with lifted("float64"):
        assert x.float().dtype is torch.float32  # no cast is needed, so none is made
        assert torch.zeros(2).dtype is torch.float64
    assert torch.zeros(2).dtype is torch.float32


def test_lifted_is_undone_if_the_code_raises() -> None:
    with pytest.raises(ZeroDivisionError), lifted("float64"):
        raise ZeroDivisionError
    assert torch.zeros(1).dtype is torch.float32


def test_without_replays_the_cause_is_unknown(tmp_path: Path) -> None:
    record: Record = diagnose(train(config(tmp_path, "train.steps=8", factor=1e6), replays=0))
    assert record.findings[0].code == "unknown"
    assert record.verdict == "inconclusive"


MOVING = """
import collections
import itertools
import random
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
    def moved(self, x, h):
        return h
    def forward(self, x):
        return self.head(self.moved(x, self.inner(x)))

class Drawing(Net):
    "What it drops, draws and normalizes is the process's own, or a buffer."
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))
    def moved(self, x, h):
        self.calls = self.calls + 1  # registered again as a new tensor
        return nn.functional.dropout(self.norm(h), 0.3) * (random.random() + float(np.random.rand()))

class Momentum(Net):
    "The key encoder's parameters are moved inside forward, as MoCo and BYOL do."
    def __init__(self, by_data=False):
        super().__init__()
        self.by_data, self.keys = by_data, nn.Linear(8, 16).requires_grad_(False)
    def moved(self, x, h):
        with torch.no_grad():
            for query, key in zip(self.inner.parameters(), self.keys.parameters()):
                if self.by_data:
                    key.data = key.data * 0.9 + query.data * 0.1
                else:
                    key.mul_(0.9).add_(query, alpha=0.1)
            return h * x[:, :1].sign() * self.keys(x)

class Counter(Net):
    "Counts, and draws from a generator of its own."
    calls = 0
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
    def moved(self, x, h):
        self.calls += 1
        return h * (1 + 0.01 * self.calls) + torch.randn(16, generator=self.generator)

class Ticking(Net):
    def __init__(self):
        super().__init__()
        self.ticks = itertools.count()
    def moved(self, x, h):
        return h * (1 + 0.01 * next(self.ticks))

def counted():
    number = 0
    def count():
        nonlocal number
        number += 1
        return number
    return count

class Holder:
    value = 0

count, seen, calls, counting, meter = 0, [], collections.Counter(), counted(), Holder()
generator, numbers, draws = torch.Generator().manual_seed(1), np.random.default_rng(1), [random.Random(1)]
mean = torch.zeros(16)

class Numbers(Net):
    "Counts and draws in globals of all kinds, in a closure, in an object and in its class."
    calls = 0
    def moved(self, x, h):
        global count
        count += 1
        seen.append(count)
        calls["forward"] += 1
        meter.value += 1
        Numbers.calls += 1
        made = count + 0.1 * len(seen) + calls["forward"] + counting() + meter.value + Numbers.calls
        drawn = torch.randn(16, generator=generator) + float(numbers.random()) + draws[0].random()
        return h * (1 + 0.01 * made) + drawn

class AGlobalMean(Net):
    def moved(self, x, h):
        mean.mul_(0.9).add_(h.detach().float().mean(0), alpha=0.1)
        return h - mean

class AMeanOfAnObject(Net):
    "In an object of an object."
    def __init__(self):
        super().__init__()
        self._held = Holder()
        self._held.value = Holder()
        self._held.value.value = torch.zeros(16)
    def moved(self, x, h):
        held = self._held.value
        held.value = 0.9 * held.value + 0.1 * h.detach().float().mean(0)
        return h - held.value

class Bank(Net):
    "A running mean in a plain attribute, in the dtype of the activations."
    bank = None
    def moved(self, x, h):
        mean = h.detach().mean(0)
        self.bank = mean if self.bank is None else 0.9 * self.bank + 0.1 * mean
        return h - self.bank

class Queue(Net):
    "Keys in a tensor that is written in place, with a plain number for the place."
    def __init__(self):
        super().__init__()
        self.queue, self.at = torch.zeros(4, 16), 0
    def moved(self, x, h):
        self.queue[self.at] = h.detach().mean(0)
        self.at = (self.at + 1) % 4
        return h - self.queue.mean(0)

class Recurrent(Net):
    "The step before leads on into the next; its hidden state is half where autocast made it."
    def __init__(self, detached=True):
        super().__init__()
        self.again, self.previous, self.detached = nn.Linear(16, 16), None, detached
    def moved(self, x, h):
        if self.previous is not None:
            h = h + torch.nn.functional.linear(self.previous.detach(), self.again.weight.to(self.previous.dtype))
        self.previous = h.detach() if self.detached else h
        return h

class Centred(nn.Module):
    "A loss with a running mean, as DINO's."
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
    def forward(self, output, target):
        loss = nn.functional.mse_loss(output - self.mean, target)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(output.float().mean(), alpha=0.1)
        return loss

class Step:
    mean = 0.0
    def training(self, model, batch):
        output = model(batch[0])
        loss = nn.functional.mse_loss(output - self.mean, batch[1])
        self.mean = 0.9 * self.mean + 0.1 * output.detach().float().mean()
        return {"loss": loss}

stepping = Step()
step = stepping.training

def data(bad=6e4):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)) for _ in range(8)]
    batches[5][0][:1] *= bad
    return batches
"""

MODELS: list[Any] = ["Drawing", "Momentum", "Counter", "Bank", "Queue", "Recurrent"]
MODELS += [("Momentum", {"by_data": True}), ("Recurrent", {"detached": False})]

STATE_OUTSIDE_THE_MODEL = ["Numbers", "AGlobalMean", "AMeanOfAnObject"]
"""Models that write state outside themselves: a replay starts with that state after the step, and restores it."""


MSE = {"loss": "torch.nn.functional:mse_loss"}


def moving(folder: Path, model: Any, bad: float = 6e4, of: dict[str, str] | None = None) -> Config:
    keys = {"model": model, "data": ("data", {"bad": bad}), **(of or MSE), "train": {"steps": 8, "device": "cpu"}}
    return written(folder, MOVING, **keys)


def trained(checked: Config, replays: int) -> tuple[Record, dict[str, Any]]:
    """The record, and the final state of the model."""
    runs: list[Run] = []

    @contextlib.contextmanager
    def kept(checked: Config) -> Iterator[Run]:
        with prepared(checked) as run:
            runs.append(run)
            yield run

    record = train(checked, replays=replays, prepare=kept)
    return record, held_by(runs[0].workload.model)


def held_by(model: torch.nn.Module) -> dict[str, Any]:
    plain = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    return {**{name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, **plain}


@pytest.mark.parametrize("model", slow_except(["Drawing", "Numbers"], [*MODELS, *STATE_OUTSIDE_THE_MODEL]), ids=str)
def test_a_run_ends_in_the_same_bits_with_and_without_replays(model: Any, tmp_path: Path) -> None:
    checked = moving(tmp_path, model)
    (plain, without), (replayed, with_replays) = trained(checked, 0), trained(checked, 2)
    assert not plain.investigations
    assert replayed.investigations
    assert not any(replay.error for made in replayed.investigations for replay in made.replays)
    assert without.keys() == with_replays.keys()
    assert all(map(same, without.values(), with_replays.values()))


@pytest.mark.parametrize("of", [{"loss": "Centred"}, {"step": "step"}], ids=str)
def test_replays_do_not_change_a_run_whose_loss_or_step_holds_state(of: dict[str, str], tmp_path: Path) -> None:
    _, without = trained(moving(tmp_path, "Net", of=of), 0)
    record, with_replays = trained(moving(tmp_path, "Net", of=of), 2)
    assert record.investigations
    assert all(map(same, without.values(), with_replays.values()))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_replay_repeats_the_loss_of_a_model_that_changes_itself_in_forward(model: Any, tmp_path: Path) -> None:
    with prepared(moving(tmp_path, model, bad=1.0)) as run:
        batches, [optimizer] = run.workload.batches(), run.workload.optimizers
        for number in range(3):
            batch = next(batches)
            snapshot = take_snapshot(run.workload.model, number, (batch,))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = run.workload.losses(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
        ended = held_by(run.workload.model)
        replays = [replay_step(run, snapshot, Manner("float16", is_lifted=False)).replay for _ in range(2)]
        assert [replay.error for replay in replays] == ["", ""]
        if "Momentum" not in model:  # it replays with its current weights
            assert [replay.loss for replay in replays] == [float(loss.detach())] * 2
        assert replay_step(run, snapshot, Manner("float64")).replay.error == ""
        assert all(map(same, ended.values(), held_by(run.workload.model).values()))


@pytest.mark.slow
def test_a_recurrent_model_is_not_blamed_for_data_beyond_float16(tmp_path: Path) -> None:
    record = diagnose(train(moving(tmp_path, "Recurrent")))
    assert (record.findings[0].code, record.findings[0].step) == ("data-range", 5)


PICTURES = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(x.float()).float().tanh()

def data():
    made = [torch.full((8, 4), 9, dtype=torch.uint16) for _ in range(4)]
    made[2][5, 1] = 65535
    return [(one, torch.ones(8, 1)) for one in made]

def loss(output, target):
    return F.mse_loss(output, target)
"""


def test_a_bright_pixel_of_a_uint16_image_is_a_data_range_finding(tmp_path: Path) -> None:
    checked = written(tmp_path, PICTURES, "train.steps=4", model=("Net", {}), data="data", loss="loss")
    (found,) = diagnose(train(checked)).findings
    assert (found.code, found.step) == ("data-range", 2)
    assert "the batch holds 65,535 in sample 5 of [0]" in found.message


@pytest.mark.slow
def test_steps_after_a_nan_batch_poisoned_the_model_are_not_investigated(tmp_path: Path) -> None:
    record = diagnose(train(moving(tmp_path, "Bank", math.nan)))
    assert (record.findings[0].code, record.findings[0].step) == ("data-nonfinite", 5)
    assert [made.step for made in record.investigations] == [5]
    assert [step.step for step in record.steps if step.skipped] == [5, 6, 7]
    assert record.findings[1].message.startswith("the loss is NaN at step 6")


def test_an_iterator_in_the_model_is_noted_only_if_the_run_replays_steps(tmp_path: Path) -> None:
    checked = moving(tmp_path, "Ticking")
    note = "the model holds an iterator, 'ticks', which every replay advances"
    assert note in train(checked).unseen.notes
    assert note not in train(checked, replays=0).unseen.notes


ROUNDED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of = of
        self.weight = nn.Parameter(torch.tensor([1.0001]))
        self.register_buffer("buffer", torch.tensor([0.3]))

    def forward(self, batch):
        parts = {"weight": self.weight, "batch": batch, "buffer": self.buffer}
        return (parts[self.of] + 0.0 * self.weight).sum()

def data():
    return [torch.tensor([2.0001])]

def step(model, batch):
    return model(batch)
"""


@pytest.mark.parametrize(("of", "moves"), [("weight", True), ("batch", False), ("buffer", False)])
def test_the_noise_floor_rounds_weights_but_not_batches_or_buffers(of: str, moves: bool, tmp_path: Path) -> None:
    with prepared(written(tmp_path, ROUNDED, model=("Net", {"of": of}), data="data", step="step")) as run:
        snapshot = take_snapshot(run.workload.model, 0, (next(run.workload.batches()),))
        exact = replay_step(run, snapshot, Manner("float32")).replay.loss
        roundings = [Manner("float32", rounds_to="float16", draw=draw) for draw in range(3)]
        moved = [replay_step(run, snapshot, manner).replay.loss != exact for manner in roundings]
    assert moved == [moves] * 3
