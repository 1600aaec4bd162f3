"""Counts in half: they stay where a further step rounds away, and other half scalars are left alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes.watch import watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import HalfCount, Record
from tests.diagnosis.test_diagnose import record_of, steps_of

Write = Callable[["Net"], object]
BF16, FP16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    count: torch.Tensor

    def __init__(self, dtype: torch.dtype, write: Write, *, is_buffer: bool = True) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 2), write
        self.passes = 0
        if is_buffer:
            self.register_buffer("count", torch.zeros((), dtype=dtype))
        else:
            self.count = torch.zeros((), dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        with torch.no_grad():
            self.write(self)
        out: torch.Tensor = self.layer(x)
        return out


def trained(net: Net, steps: int, passes: int = 1, skipped: tuple[int, ...] = ()) -> Record:
    model = nn.Sequential(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer) as watched:
        for step in range(steps):
            for _ in range(passes):
                model(torch.randn(8, 4)).square().mean().backward()
            if step not in skipped:
                optimizer.step()
            optimizer.zero_grad()
    record = diagnose(watched.record())
    assert from_json(to_json(record)) == record
    return record


def found(record: Record) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in record.findings if one.code == "rounded-buffer"]


def add(amount: float) -> Write:
    return lambda net: net.count.add_(amount)


def renew(net: Net) -> None:
    net.count = net.count + 1


def add_and_cap(net: Net) -> None:
    net.count.copy_((net.count + 1).clamp(max=100))


def sum_of_a_step(net: Net) -> None:
    net.count.zero_()
    for _ in range(8):
        net.count += 1


def sum_of_an_epoch(net: Net) -> None:
    net.count.mul_(float(net.count) < 50).add_(1)


def average(net: Net) -> None:
    net.count.lerp_(torch.rand(()).to(net.count), 0.1)


def stop_at_256(net: Net) -> None:
    if net.passes <= 256:
        net.count += 1


STANDS, GROWS = [("rounded-buffer", "warning")], [("rounded-buffer", "info")]


@pytest.mark.parametrize(
    ("write", "value", "expected"), [(add(1), 256.0, 300.0), (add(8), 2048.0, 2400.0), (renew, 256.0, 300.0)]
)
@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_count_in_bfloat16_that_stays_at_its_limit_is_found(
    write: Write, value: float, expected: float, is_buffer: bool
) -> None:
    net = Net(BF16, write, is_buffer=is_buffer)
    record = trained(net, 300)
    assert float(net.count) == value
    [count] = record.half_counts
    assert (count.name, count.value, count.expected) == ("0.count", value, expected)
    assert (found(record), record.verdict) == (STANDS, "precision")
    assert record.findings[0].remedy == "keep the count in float32, or in an integer"


def test_the_same_count_in_float32_or_in_an_integer_is_not_followed() -> None:
    for dtype in (torch.float32, torch.int64):
        record = trained(Net(dtype, add(1)), 300)
        assert (record.findings, record.half_counts) == ((), ())


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, "256"), (FP16, "2,048")])
def test_a_count_below_its_limit_is_information_that_names_the_limit(dtype: torch.dtype, limit: str) -> None:
    record = trained(Net(dtype, add(1)), 40)
    assert (found(record), record.verdict) == (GROWS, "healthy")
    assert f"it will stay at {limit}, where a further 1 rounds away" in record.findings[0].message


@pytest.mark.parametrize("write", [add_and_cap, sum_of_a_step, sum_of_an_epoch, average, stop_at_256])
def test_a_scalar_that_is_no_endless_count_is_silent(write: Write) -> None:
    assert found(trained(Net(BF16, write), 270)) == []


def test_micro_batches_and_skipped_steps_do_not_hide_a_count() -> None:
    assert found(trained(Net(BF16, add(1)), 80, passes=4, skipped=(0, 3))) == STANDS
    assert found(trained(Net(BF16, add(1)), 40, passes=4, skipped=(0, 3))) == GROWS


def test_a_count_whose_limit_half_cannot_reach_is_silent() -> None:
    count = HalfCount("count", "float16", 100.0, 4000.0, 4000.0)
    assert found(diagnose(record_of(steps_of("."), half_counts=(count,)))) == []
    small = replace(count, step=8.0)
    assert found(diagnose(record_of(steps_of("."), half_counts=(small,)))) == GROWS
