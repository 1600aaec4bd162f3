"""The growth of weights by updates: a learning rate that blows them up is not blamed on precision."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.pinning.bisection import bisect_run
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from tests.siblings import slow_except
from tests.written import written

BLOWN_UP = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, gain):
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
        )
        self.gain, self.calls = gain, 0

    def forward(self, x):
        self.calls += self.training
        for module in self:
            x = module(x)
            if module is self[1] and self.calls > 3:
                x = self[3](x * self.gain) / self.gain
                return self[8](x.mean((2, 3)))
        return x

def data():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(6, 3, 10, 10, generator=generator) for _ in range(8)]
    return [(x * 30, torch.randint(2, (6,), generator=generator)) for x in batches]

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
"""


def blown_up(folder: Path, rate: float, gain: float) -> Config:
    return of_fp16(folder, BLOWN_UP, model=("Net", {"gain": gain}), optimizer=("torch.optim:RMSprop", {"lr": rate}))


def of_fp16(folder: Path, code: str, **keys: Any) -> Config:
    keys = {"data": "data", "step": "loss", **keys}
    return written(folder, code, **keys, train={"steps": 6}, precision={"dtype": "float16"})


def scanned(folder: Path, rate: float, gain: float) -> Record:
    return diagnose(train(blown_up(folder, rate, gain), replays=2))


def test_weights_blown_up_by_the_learning_rate_are_not_blamed_on_precision(tmp_path: Path) -> None:
    record = scanned(tmp_path, rate=1e3, gain=1.0)
    root = record.findings[0]

    assert (root.code, root.op.rpartition(".")[0]) == ("unknown", "aten.convolution")
    assert "times as large as at the start" in root.message
    assert "lower the learning rate" in root.remedy
    assert record.investigations[0].weights_grew > 1000
    assert root.evidence["weights_grew"] == record.investigations[0].weights_grew


@pytest.mark.slow
def test_bisect_suggests_no_pin_for_weights_blown_up_by_the_learning_rate(tmp_path: Path) -> None:
    record = bisect_run(blown_up(tmp_path, rate=1e3, gain=1.0))

    assert (record.pins, record.trials) == ((), ())
    assert record.search is not None
    assert record.search.outcome == "no-pin-helps"
    assert "lower the learning rate" in record.search.message


@pytest.mark.slow
def test_an_overflow_with_weights_of_normal_size_is_blamed_on_precision(tmp_path: Path) -> None:
    record = scanned(tmp_path, rate=1e-3, gain=1e5)

    assert record.findings[0].code == "forward-overflow"
    assert record.investigations[0].weights_grew == pytest.approx(1.0, abs=0.1)


LEAPS = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    hidden = [part for _ in range(2) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *hidden, nn.Linear(64, 1))

def data(gain):
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    return [(x, x[:, :1].sin(), gain if step == 3 else 1.0) for step in range(8)]

def loss(model, batch):
    x, y, gain = batch
    return nn.functional.mse_loss(model(x), y) * gain
"""


LEAPING = [(0.3, 1.0, "divergence"), (1.0, 1.0, "divergence"), (1e-3, 1e9, "")]


@pytest.mark.parametrize("case", slow_except(LEAPING[2:], LEAPING), ids=str)
def test_a_loss_that_jumps_in_fp32_too_is_divergence_only_if_weights_grew(
    tmp_path: Path, case: tuple[float, float, str]
) -> None:
    rate, gain, code = case
    adam = ("torch.optim:Adam", {"lr": rate})
    thrown = of_fp16(tmp_path, LEAPS, model="model", data=("data", {"gain": gain}), optimizer=adam)
    root = diagnose(train(thrown, replays=2)).findings[0]
    assert (root.code, root.remedy.startswith("lower the learning rate")) == (code or "gradient-overflow", bool(code))
    assert "in FP32 too the loss jumps to" in root.message
    assert ("times as large as at the start of the run" in root.message) == bool(code)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_growth_is_measured_from_the_first_backward_pass(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(4, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer) as watched:
        assert watched.optimizers.weights_grew == 1.0
        for times in (50.0, 4.0):  # the first is a checkpoint loaded before the run starts
            for parameter in model.parameters():
                parameter.data *= times
            model(torch.ones(1, 4, dtype=dtype)).sum().backward()
            optimizer.step()

        assert watched.optimizers.weights_grew == pytest.approx(4.0, rel=1e-2)


@pytest.mark.slow
def test_weight_growth_is_measured_for_a_second_optimizer_after_the_first_is_freed() -> None:
    watched = Watch(None, ())
    with watched:
        for times in (1.0, 3.0):
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            model(torch.ones(1, 4)).sum().backward()
            for parameter in model.parameters():
                parameter.data *= times
            assert watched.optimizers.weights_grew == pytest.approx(times)
            del model, optimizer, parameter
            gc.collect()


def test_weights_that_start_near_zero_are_measured_from_a_common_initial_size() -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    model.weight.data.fill_(1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer) as watched:
        model(torch.ones(1, 64)).sum().backward()
        model.weight.data.fill_(0.04)
        assert watched.optimizers.weights_grew == pytest.approx(2.0, rel=1e-3)  # relative to a common start, 0.02
        model.weight.data.fill_(20.0)
        assert watched.optimizers.weights_grew == pytest.approx(1000.0, rel=1e-3)


def test_weights_that_start_at_zero_or_hold_nan_count_as_not_grown() -> None:
    model = torch.nn.Linear(4, 2)
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with watch(model, optimizer) as watched:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert watched.optimizers.weights_grew == 1.0

        model.weight.data[0, 0] = float("nan")
        assert watched.optimizers.weights_grew == 1.0
