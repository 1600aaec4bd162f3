"""Tests of the updates that half weights lose, against float32 masters that a test steps; windows leave no trace."""

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import ampdbg
from ampdbg.commands.output import PLAIN
from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes import update_ledger
from ampdbg.probes.dtype_contract import kind_of
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import Record
from ampdbg.report.formats import written as text_of
from ampdbg.report.view import CommandContext
from ampdbg.training.loop import train
from tests.script.test_run import run_with_page
from tests.siblings import slow_except
from tests.written import written

HALF = torch.bfloat16


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows follow each other without a gap."""
    monkeypatch.setattr(update_ledger, "SHARE", 1e9)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Net(nn.Module):
    """Weights of 0.02 · randn around a norm whose gains are ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(64, 64), RMSNorm(64), nn.Linear(64, 64)
        for linear in (self.inner, self.outer):
            linear.weight.data = 0.02 * torch.randn(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.norm(self.inner(x)))
        return out


def losses(net: nn.Module, dtype: torch.dtype, steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    goal = torch.randn(64, 64, generator=generator) / 8
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator)
        yield (net(x.to(dtype)).float() - x @ goal).square().mean()


Made = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), **{"lr": 1e-4, **options})


def looped(
    net: nn.Module,
    optimizer: Any,
    steps: int,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> Record:
    """Trains the net; the functions run before and after each step of the optimizer, or of its ``inner`` one."""
    with watch(net, getattr(optimizer, "inner", optimizer)) as watched:
        for loss in losses(net, next(net.parameters()).dtype, steps):
            net.zero_grad()
            loss.backward()
            before()
            optimizer.step()
            after()
    return diagnose(watched.record())


def trained(dtype: torch.dtype = HALF, steps: int = 200, make: Made = adamw) -> tuple[Record, Net]:
    net = Net().to(dtype)
    return looped(net, make(net), steps), net


def codes(record: Record) -> list[tuple[str, str]]:
    return [(found.code, found.severity) for found in record.findings]


def judged(record: Record) -> int:
    """The number of half parameters that were compared with float32 masters."""
    return 0 if record.updates is None else record.updates.judged


# Frozen weights


def test_gains_that_freeze_at_one_in_bfloat16_are_named_and_gains_in_float32_move() -> None:
    record, net = trained()
    assert int((net.norm.weight != 1).sum()) == 0
    assert record.updates is not None
    assert (codes(record), record.verdict) == ([("frozen-weights", "error")], "precision")
    assert "norm.weight (0 of 64 values). Rounding loses" in record.findings[0].message
    assert record.findings[0].parameter == "norm.weight"
    lost = [f"{kind.lost:.0%} in {kind.kind}" for kind in record.updates.kinds if (kind.lost or 0.0) > 0.5]
    whole = f"{record.updates.lost:.0%} in all half weights together. By a first-order estimate"
    shares = ", ".join(["100% in these parameters", *lost])
    loses = f"Rounding loses this much of the movement of float32 weights: {shares} and {whole}"
    assert loses in record.findings[0].message

    twin, net = trained(torch.float32)
    assert int((net.norm.weight != 1).sum()) == 64
    assert (codes(twin), twin.updates, twin.unseen.notes) == ([], None, ())


def test_a_flat_parameter_is_sampled_and_a_norm_is_compared_in_full() -> None:
    flat, gains = nn.Parameter(torch.ones(1_000_000, dtype=HALF)), nn.Parameter(torch.ones(65_536, dtype=HALF))
    optimizer = torch.optim.AdamW([flat, gains], lr=1e-4)
    with watch(nn.ParameterList([flat, gains]), optimizer) as watched:
        for _ in range(update_ledger.WINDOW + 2):
            optimizer.zero_grad()
            (flat.sum() + gains.sum()).backward()
            optimizer.step()
    updates = watched.record().updates
    assert updates is not None
    assert {one.name: one.entries for one in updates.frozen} == {"0": 1024, "1": 65_536}


def test_a_step_with_a_closure_is_sampled_like_one_without(always: None) -> None:
    (expected, twin), (net, steps) = trained(steps=20), (Net().to(HALF), list[int]())
    optimizer = adamw(net)
    with watch(net, optimizer) as watched:
        for loss in losses(net, HALF, 20):

            def closure(loss: torch.Tensor = loss) -> float:
                optimizer.zero_grad()
                loss.backward()
                steps.append(len(steps))
                return loss.item()

            optimizer.step(closure)
    assert watched.record().updates == expected.updates
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert steps == [*range(20)]


def test_gains_that_move_at_a_larger_learning_rate_are_healthy() -> None:
    record, net = trained(make=lambda net: adamw(net, lr=3e-2))
    assert int((net.norm.weight != 1).sum()) == 64
    assert codes(record) == []
    assert record.updates is not None


class Faint(Net):
    """Also has gains of ones that the loss hardly depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.faint = RMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-3 * self.faint(x)


def test_frozen_weights_are_not_a_finding_if_the_loss_falls_as_with_float32_masters() -> None:
    def ended(masters: bool) -> tuple[float, Record, int]:
        net = Faint().to(HALF)
        optimizer, copy = float32_masters(net, lambda those: torch.optim.SGD(those, lr=1.0))
        if not masters:
            optimizer, copy = torch.optim.SGD(net.parameters(), lr=1.0), lambda: None
        record = looped(net, optimizer, 100, copy, copy)
        return record.steps[-1].loss, record, int((net.faint.weight != 1).sum())

    loss, record, moved = ended(masters=False)
    in_float32, twin, moved_in_float32 = ended(masters=True)
    assert (codes(record), codes(twin), moved, moved_in_float32) == ([], [], 0, 0)
    assert loss == pytest.approx(in_float32, abs=1e-3)


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
dtype = torch.{dtype}

class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

net = nn.Sequential(nn.Linear(64, 64, bias=False), RMSNorm(), nn.Linear(64, 64, bias=False))
for linear in (net[0], net[2]):
    linear.weight.data = 0.02 * torch.randn(64, 64)
net.to(dtype)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
goal = torch.randn(64, 64) / 8
for _ in range(200):
    x = torch.randn(32, 64)
    loss = (net(x.to(dtype)).float() - x @ goal).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("moved:", int((net[1].weight != 1).sum()))
"""


def test_run_reports_frozen_gains_without_an_option_but_none_in_float32(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, SCRIPT.format(dtype="bfloat16"), options=())
    assert (codes(record), code) == ([("frozen-weights", "error")], 1)
    assert "1.weight (0 of 64 values)" in page
    record, _, code = run_with_page(tmp_path, SCRIPT.format(dtype="float32"), options=())
    assert (codes(record), code, record.updates) == ([], 0, None)


UPCAST = """
for _, p in net.named_parameters():
    p = p.to(torch.float32)
optimizer = torch"""


def test_run_reports_an_upcast_that_has_no_effect(tmp_path: Path) -> None:
    text = SCRIPT.replace("\noptimizer = torch", UPCAST, 1).replace("lr=1e-4", "lr=3e-2").replace("200", "20")
    record, page, code = run_with_page(tmp_path, text.format(dtype="bfloat16"), options=())
    assert (codes(record), code) == ([("misuse-lost-upcast", "error")], 1)
    assert "p = p.to(torch.float32)" in page
    assert "the upcast has no effect" in page
    source = record.findings[0].source
    assert source is not None
    assert (source.file, source.text) == ("train.py", "p = p.to(torch.float32)")

    twin = text.replace("    p = p.to(torch.float32)", "    p.data = p.data.to(torch.float32)")
    record, _, code = run_with_page(tmp_path, twin.format(dtype="bfloat16").replace("x.to(dtype)", "x"), options=())
    assert (codes(record), code, {name for one in record.dtypes for name in one.stored}) == ([], 0, {"float32"})


def share_of_float32_way(steps: int, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> dict[str, float]:
    """The share of the way of float32 masters that half weights go, by parameter. The masters are stepped with the
    gradients of the half weights."""
    net, make = Net().to(HALF), make or partial(torch.optim.AdamW, lr=1e-4)
    optimizer = make(net.parameters())
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in net.parameters()]
    start, beside = [master.detach().clone() for master in masters], make(masters)
    for loss in losses(net, HALF, steps):
        optimizer.zero_grad()
        loss.backward()
        for parameter, master in zip(net.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        beside.step()
    ways = {}
    for (name, parameter), master, began in zip(net.named_parameters(), masters, start, strict=True):
        wanted, got = master.detach() - began, parameter.detach().float() - began
        ways[name] = float((wanted * got).sum() / (wanted * wanted).sum())
    return ways


def test_the_share_lost_in_ten_steps_matches_float32_masters() -> None:
    record, _ = trained(steps=10)
    ways = share_of_float32_way(10)
    assert record.updates is not None
    lost = {kind.kind: kind.lost for kind in record.updates.kinds}
    assert lost["norms"] == 1.0 - ways["norm.weight"] == 1.0
    assert lost["linears"] == pytest.approx(1.0 - (ways["inner.weight"] + ways["outer.weight"]) / 2, abs=0.02)


def test_ten_later_steps_lose_within_ten_points_of_the_share_lost_in_200_steps(always: None) -> None:
    record, _ = trained(steps=30)
    updates = record.updates
    assert updates is not None
    lost, ways = {kind.kind: kind.lost for kind in updates.kinds}, share_of_float32_way(200)
    assert updates.steps == 10
    assert lost["norms"] == pytest.approx(1.0 - ways["norm.weight"], abs=0.1)
    assert lost["linears"] == pytest.approx(1.0 - (ways["inner.weight"] + ways["outer.weight"]) / 2, abs=0.1)


@pytest.mark.parametrize("momentum", slow_except([0.9], [0.0, 0.9]))
def test_gains_that_oscillate_lose_the_same_share_in_sampled_steps_as_in_all(momentum: float, always: None) -> None:
    make = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    record, _ = trained(make=lambda net: make(net.parameters()))
    assert record.updates is not None
    lost, ways = {kind.kind: kind.lost for kind in record.updates.kinds}, share_of_float32_way(200, make)
    assert lost["norms"] == pytest.approx(1.0 - ways["norm.weight"], abs=0.05)
    assert lost["linears"] == pytest.approx(1.0 - (ways["inner.weight"] + ways["outer.weight"]) / 2, abs=0.05)
    page = text_of(record, CommandContext("", ""), PLAIN, "markdown")
    assert "Measured in these steps alone: others may lose more or less." in page


def test_gains_that_have_mostly_moved_back_and_forth_are_not_frozen(always: None) -> None:
    def found(gradients: Callable[[int], float]) -> tuple[list[tuple[str, str]], float | None]:
        weight = nn.Parameter(torch.ones(64, dtype=HALF))
        record = stepped(torch.optim.SGD([weight], lr=1.0), weight, [gradients(step) for step in range(120)])
        assert record.updates is not None
        return codes(record), record.updates.lost

    # A large step now and then, which a step after the next window takes back, and a small one all the time.
    swings, lost = found(lambda step: 1e-3 + {0: 0.25, 1: -0.25}.get(step // 10 % 2, 0.0) * (step % 10 == 5))
    assert (swings, lost) == ([("optimizer-underflow", "warning")], 1.0)
    still, lost = found(lambda step: 1e-3)
    assert (still, lost) == ([("frozen-weights", "error")], 1.0)


def test_a_kind_freezes_below_the_forecast_learning_rate() -> None:
    record, _ = trained(steps=10)
    assert record.updates is not None
    rates = {kind.kind: kind.freezes_below or 0.0 for kind in record.updates.kinds}
    for kind, rate in rates.items():
        for factor, stands_still in ((0.5, True), (2.0, False)):
            other, _ = trained(steps=10, make=partial(adamw, lr=rate * factor))
            assert other.updates is not None
            unmoved = next(one.unmoved for one in other.updates.kinds if one.kind == kind)
            assert (unmoved > 0.5) == stands_still, (kind, factor, unmoved)


# Weight decay and the second moment


def stepped(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[float]) -> Record:
    net = nn.Module()
    net.weight = weight
    with watch(net, optimizer) as watched:
        for gradient in gradients:
            optimizer.zero_grad()
            (weight * gradient).sum().backward()
            optimizer.step()
    return diagnose(watched.record())


@pytest.mark.parametrize("fused", slow_except([False], [False, True]))
def test_a_lost_weight_decay_is_reported_without_blaming_the_gradient(fused: bool) -> None:
    def decayed(dtype: torch.dtype) -> tuple[Record, float]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4096).to(dtype))
        began = float(weight.detach().float().norm())
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01, fused=fused)
        record = stepped(optimizer, weight, [0.0] * 100)
        return record, float(weight.detach().float().norm()) / began

    record, shrunk = decayed(HALF)
    assert (codes(record), shrunk) == ([("optimizer-underflow", "warning")], 1.0)
    assert "it is 100% of the weight decay, for the weight decay is mostly below" in record.findings[0].message
    assert (record.findings[0].evidence.get("lost_gradient"), record.findings[0].evidence["lost_decay"]) == (None, 1.0)

    record, shrunk = decayed(torch.float32)
    assert codes(record) == []
    assert shrunk == pytest.approx(0.999, abs=1e-4)


@pytest.mark.parametrize("gradient", [1e-5, 0.1])
def test_updates_go_too_far_if_float16_flushes_the_second_moment_to_zero(gradient: float) -> None:
    def way(dtype: torch.dtype) -> tuple[Record, float]:
        weight = nn.Parameter(torch.ones(512).to(dtype))
        record = stepped(torch.optim.AdamW([weight], lr=1e-3, eps=1e-6, weight_decay=0.0), weight, [gradient] * 20)
        return record, float((weight.detach().float() - 1.0).norm())

    half, in_float32 = way(torch.float16), way(torch.float32)
    is_zero = gradient < 1e-3  # the square is flushed to zero, and the gradient is ten times eps
    assert codes(half[0]) == ([("optimizer-underflow", "error")] if is_zero else [])
    assert codes(in_float32[0]) == []
    if is_zero:
        assert half[0].findings[0].evidence["times"] == pytest.approx(half[1] / in_float32[1], rel=0.3)


@pytest.mark.slow
def test_a_second_moment_stuck_in_bfloat16_is_reported_with_its_factor_of_twenty(always: None) -> None:
    gradients = [1.0] * 50 + [0.01] * 3000

    def second(beta: float, dtype: torch.dtype) -> tuple[Record, float]:
        weight = nn.Parameter(torch.ones(2048, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=0.0, betas=(0.9, beta))
        record = stepped(optimizer, weight, gradients)
        return record, float(optimizer.state[weight]["exp_avg_sq"].float().mean())

    record, kept = second(0.999, HALF)
    healthy, in_float32 = second(0.999, torch.float32)
    assert kept / in_float32 == pytest.approx(20.0, rel=0.05)
    assert (codes(record), codes(healthy)) == ([("stuck-moment", "warning")], [])
    assert record.findings[0].evidence["times"] == pytest.approx(kept / in_float32, rel=0.05)
    assert "beta2 = 0.95" in record.findings[0].remedy

    twin, kept = second(0.95, HALF)
    assert kept == pytest.approx(1e-4, rel=0.1)
    assert codes(twin) == []


@pytest.mark.parametrize("windows", [range(390, 2000, 400), pytest.param([390, 790], marks=pytest.mark.slow)], ids=str)
def test_a_stuck_second_moment_is_found_from_windows_over_a_part_of_the_steps(
    windows: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {beta: nn.Parameter(torch.ones(64, dtype=HALF)) for beta in (0.999, 0.997, 0.95)}
    optimizer = torch.optim.AdamW([{"params": [weights[beta]], "betas": (0.9, beta)} for beta in weights], lr=0.0)
    with watch(nn.ParameterList(weights.values()), optimizer) as watched:
        for step in range(2000):
            monkeypatch.setattr(update_ledger, "SHARE", 1e9 * (step in windows))
            optimizer.zero_grad()
            (torch.stack([*weights.values()]) * (1.0 if step < 50 else 0.01)).sum().backward()
            optimizer.step()
        seen = watched.ledger.seen
    assert seen is not None
    # At 0.997 a moment sticks once its mantissa is below 1.3, at 0.95 never. The message says "at least".
    assert [(one.parameter, one.steps) for one in seen.stuck] == [("0", 2000), ("1", 2000)]
    for one, beta, least in zip(seen.stuck, weights, (0.7, 0.4), strict=False):
        assert one.beta == pytest.approx(beta)
        in_float32 = (1.0 - beta**50) * beta**1950 + 1e-4 * (1.0 - beta**1950)
        kept = float(optimizer.state[weights[beta]]["exp_avg_sq"].float().mean())
        assert least < one.times / (kept / in_float32) <= 1.01


def test_steps_between_windows_take_none_of_the_time_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = count()  # each look at the clock takes one
    monkeypatch.setattr(update_ledger, "time", SimpleNamespace(perf_counter=lambda: next(milliseconds) / 1000))
    net = nn.Linear(4, 4).to(HALF)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    with watch(net, optimizer) as watched:
        for _ in range(2000):
            optimizer.zero_grad()
            net(torch.ones(2, 4, dtype=HALF)).square().sum().backward()
            optimizer.step()
    seen = watched.ledger.seen
    assert seen is not None
    assert seen.steps == 4 * update_ledger.WINDOW  # four later windows of 30 ms in 6 s


@pytest.mark.parametrize("passes", slow_except([16, 1024], [16, 64, 256, 1024]))
def test_the_error_of_gradients_accumulated_in_half_is_measured_from_one_step(passes: int) -> None:
    def accumulated(dtype: torch.dtype) -> tuple[Record, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(64, 64, bias=False).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        with watch(net, optimizer) as watched:
            for _ in range(2):
                optimizer.zero_grad()
                gradients = (1e-3 + 1e-4 * torch.randn(passes, 64, 64)).to(dtype)
                for gradient in gradients:
                    (net.weight * gradient).sum().backward()
                assert net.weight.grad is not None
                summed = net.weight.grad.float()
                optimizer.step()
        assert not net.weight._backward_hooks
        return diagnose(watched.record()), summed, gradients.float().sum(0)

    record, summed, in_float32 = accumulated(HALF)
    lost = float((summed - in_float32).norm() / in_float32.norm())
    assert lost == pytest.approx({16: 0.004, 64: 0.007, 256: 0.015, 1024: 0.51}[passes], rel=0.2)
    assert record.updates is not None
    assert record.updates.passes == passes
    assert record.updates.lost_accumulation == pytest.approx(lost, rel=1e-3)
    found = [found.message for found in record.findings if found.code == "lost-accumulation"]
    said = "the sum of 1024 gradients in half is 51% from float32's"
    assert [message.partition(":")[0] for message in found] == [said] * (lost > 0.1)

    twin, summed, in_float32 = accumulated(torch.float32)
    assert torch.allclose(summed, in_float32, rtol=1e-4)
    assert (codes(twin), twin.updates) == ([], None)


# With float32 masters, nothing is reported


class WithMasters(torch.optim.Optimizer):
    """Keeps masters in its state, as TransformerEngine's FusedAdam does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            master = state.setdefault("master", parameter.detach().float().clone())
            master -= 1e-4 * parameter.grad.float().sign()
            parameter.copy_(master)


def float32_masters(
    net: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = lambda those: torch.optim.AdamW(those, lr=1e-4)
) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """An optimizer of float32 masters, and a function that copies gradients to them and weights back."""
    halves = list(net.parameters())
    masters = [nn.Parameter(half.detach().float()) for half in halves]

    def copy() -> None:
        for half, master in zip(halves, masters, strict=True):
            master.grad = None if half.grad is None else half.grad.float()
            half.data.copy_(master.detach())

    return make(masters), copy


def test_nothing_is_reported_if_the_optimizer_steps_float32_masters() -> None:
    net = Net().to(HALF)
    optimizer, copy = float32_masters(net)
    gains: list[torch.Tensor] = []

    def kept() -> None:
        copy()
        gains.append(net.norm.weight.detach().clone())

    record = looped(net, optimizer, 60, before=kept, after=copy)
    assert float((net.norm.weight == gains[-1]).float().mean()) > 0.9  # their float32 masters move
    assert (codes(record), record.updates, record.unseen.notes) == ([], None, ())


class FlatMasters:
    """Steps one flat float32 parameter for all half weights, as DeepSpeed's BF16_Optimizer does."""

    def __init__(self, net: nn.Module) -> None:
        self.halves = list(net.parameters())
        self.flat = nn.Parameter(torch.cat([half.detach().float().flatten() for half in self.halves]))
        self.inner = torch.optim.AdamW([self.flat], lr=1e-4)

    def step(self) -> None:
        self.flat.grad = torch.cat([half.grad.float().flatten() for half in self.halves if half.grad is not None])
        self.inner.step()
        parts = self.flat.detach().split([half.numel() for half in self.halves])
        for half, part in zip(self.halves, parts, strict=True):
            half.data.copy_(part.view_as(half))


class MainParameters:
    """Replaces the half parameters with float32 ones, as Megatron's Float16OptimizerWithFloat16Params does."""

    def __init__(self, net: nn.Module) -> None:
        self.inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
        group = self.inner.param_groups[0]
        self.halves, group["params"] = group["params"], [nn.Parameter(one.detach().float()) for one in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        mains = self.inner.param_groups[0]["params"]
        for half, main in zip(self.halves, mains, strict=True):
            main.grad = half.grad.float()
        self.inner.step()
        torch._foreach_copy_(self.halves, mains)


class StochasticRounding(torch.optim.Optimizer):
    """Rounds up or down at random, as torchao's optimizers do with ``bf16_stochastic_round``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for half in self.param_groups[0]["params"]:
            bits = (half.float() - 1e-4 * half.grad.float().sign()).view(torch.int32)
            bits += torch.randint_like(bits, 1 << 16)
            half.copy_((bits & -(1 << 16)).view(torch.float32))


@pytest.mark.parametrize("make", [FlatMasters, MainParameters, StochasticRounding])
def test_nothing_is_reported_if_a_library_keeps_masters_or_rounds_stochastically(make: Any) -> None:
    record, _ = trained(make=make, steps=60)
    assert (codes(record), judged(record)) == ([], 0)


NAMED = "inner.weight, inner.bias, norm.weight, outer.weight and 1 more"
WHY = "a hook or the loop writes weights of that optimizer too, maybe from float32 copies"
FOREIGN = (f"ampdbg does not compare updates of {NAMED} with float32's: {WHY}",)


@pytest.mark.parametrize("steps", [1, 30])
def test_nothing_is_reported_but_a_note_if_an_optimizer_hook_writes_masters_back(steps: int) -> None:
    def made(net: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(net)
        masters, copy = float32_masters(net)  # the gains are the same in half at first

        def write(*given: Any) -> None:
            copy()
            masters.step()
            copy()

        optimizer.register_step_post_hook(write)
        return optimizer

    record, _ = trained(make=made, steps=steps)
    assert (codes(record), judged(record), record.unseen.notes) == ([], 0, FOREIGN)


def test_a_hook_that_leaves_the_weights_alone_does_not_change_the_report() -> None:
    orders: list[list[str]] = []

    def made(net: nn.Module) -> torch.optim.Optimizer:
        optimizer, order = adamw(net), list[str]()
        average = torch.optim.swa_utils.AveragedModel(net)
        optimizer.register_step_post_hook(lambda *given: order.append("first"))
        optimizer.register_step_post_hook(lambda *given: average.update_parameters(net))
        optimizer.register_step_post_hook(lambda *given: order.append("last"))
        orders.append(order)
        return optimizer

    (expected, twin), (record, net) = trained(steps=30), trained(make=made, steps=30)
    assert codes(record) == codes(expected) == [("frozen-weights", "error")]
    assert record.findings == expected.findings
    assert record.updates is not None
    assert (replace(record.updates, averages=()), record.unseen.notes) == (expected.updates, ())
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert orders == [["first", "last"] * 30]


def test_weights_that_become_nan_are_not_reported_as_written_by_the_loop() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=HALF))
    record = stepped(torch.optim.SGD([weight], lr=0.1), weight, [1.0, math.nan, 1.0])
    assert bool(weight.isnan().all())
    assert record.unseen.notes == ()


def with_own_step(net: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = adamw(net)
    optimizer.step = partial(optimizer.step)
    return cast("torch.optim.Optimizer", optimizer)


def with_the_step_of_a_scheduler(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(net)
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return optimizer


@pytest.mark.parametrize(
    ("make", "who", "why"),
    [
        (
            lambda net: WithMasters(net.parameters()),
            f"{__name__}.WithMasters",
            "it keeps what rounding takes from the half weights",
        ),
        (with_own_step, "the script's own step of torch.optim.adamw.AdamW", "the script has set the step itself"),
        (with_the_step_of_a_scheduler, "", ""),
    ],
    ids=["masters in its state", "own step", "a scheduler"],
)
def test_a_step_of_unknown_code_is_not_compared_and_has_a_note(make: Made, who: str, why: str) -> None:
    record, _ = trained(make=make, steps=30)
    note = f"ampdbg does not compare updates by {who} with float32's: {why}"
    assert (judged(record) > 0, record.unseen.notes) == (not who, (note,) * bool(who))
    assert codes(record) == [("frozen-weights", "error")] * (not who)


def test_nothing_is_reported_but_a_note_if_the_loop_writes_the_weights() -> None:
    net = Net().to(HALF)
    optimizer, masters = adamw(net), [parameter.detach().float().clone() for parameter in net.parameters()]

    def write() -> None:
        for parameter, master in zip(net.parameters(), masters, strict=True):
            assert parameter.grad is not None
            parameter.data.copy_(master.sub_(1e-2 * parameter.grad.float().sign()))

    record = looped(net, optimizer, 30, after=write)
    assert (codes(record), judged(record), record.unseen.notes) == ([], 0, FOREIGN)


class OwnStep(torch.optim.Optimizer):
    """Steps in float32 as Adam without momentum and copies the result to the half weights, as fairseq's Adam does.

    If ``keeps`` names float32 weights or the rounding error in the state, the next step starts from them.
    """

    def __init__(self, parameters: Any, lr: float = 5e-4, keeps: str = "", **attributes: Any) -> None:
        super().__init__(parameters, {"lr": lr})
        self.keeps = keeps
        vars(self).update(attributes)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for half in group["params"]:
                state, gradient = self.state[half], half.grad.float()
                second = state.setdefault("exp_avg_sq", gradient.square())
                second.lerp_(gradient.square(), 0.1)
                taken = half.float() + state.get("kahan", 0.0)
                exact = state.get("whole", taken) - group["lr"] * gradient / (second.sqrt() + 1e-8)
                half.copy_(exact)
                kept = {"whole": exact, "kahan": exact - half.float()}
                state.update({key: value for key, value in kept.items() if key == self.keeps})


def gains(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in net.named_parameters() if "norm" in name]


def own(keeps: str = "", lr: float = 5e-4) -> Made:
    return lambda net: OwnStep(net.parameters(), lr, keeps)


def own_with_net(keeps: str = "", lr: float = 5e-4) -> Made:
    """An optimizer that cannot be compared, because it has more than numbers of its own."""
    return lambda net: OwnStep(net.parameters(), lr, keeps, net=net)


def note_of(kind: type[Any], why: str) -> str:
    return f"ampdbg does not compare updates by {__name__}.{kind.__name__} with float32's: {why}"


def page_of(record: Record) -> str:
    return " ".join(text_of(record, CommandContext("", ""), PLAIN, "text").split())


def test_half_values_that_never_change_are_named_if_the_optimizer_is_not_compared() -> None:
    record, net = trained(steps=60, make=own_with_net())
    assert int((net.norm.weight != 1).sum()) == 0
    assert (codes(record), record.verdict, judged(record)) == ([("frozen-weights", "warning")], "precision", 0)
    assert record.unseen.notes == (note_of(OwnStep, "its twin may not share its attribute net"),)
    assert record.findings[0].parameter == "norm.weight"
    message = "0 of 64 values of norms (1) have changed in 51 steps: norm.weight. Their gradients are not zero"
    assert record.findings[0].message.startswith(message)
    assert from_json(to_json(record)) == record


def without_gradient(net: nn.Module) -> torch.optim.Optimizer:
    for gain in gains(net):
        gain.register_hook(torch.zeros_like)
    return OwnStep(net.parameters(), net=net)


def without_gains(net: nn.Module) -> torch.optim.Optimizer:
    return OwnStep([one for one in net.parameters() if all(one is not gain for gain in gains(net))], net=net)


def gains_at_rate_zero(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = without_gains(net)
    optimizer.add_param_group({"params": gains(net), "lr": 0.0})
    return optimizer


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (own_with_net("whole"), 60),
        (own_with_net("kahan"), 60),
        (own_with_net(lr=3e-2), 60),
        (own_with_net(), 20),
        (own_with_net(lr=1e-5), 60),  # in so few steps, float32 weights would not change in half either
        (without_gradient, 60),
        (without_gains, 60),
        (gains_at_rate_zero, 60),
    ],
    ids=["masters", "kahan", "rate", "few-steps", "small-rate", "no-gradient", "not-held", "rate-0"],
)
def test_values_that_may_rest_or_are_kept_in_float32_are_not_reported_as_frozen(make: Made, steps: int) -> None:
    record, _ = trained(steps=steps, make=make)
    assert (codes(record), judged(record)) == ([], 0)


class CompensatedSGD(torch.optim.Optimizer):
    """SGD that keeps the rounding error of half weights under a name that says nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for half in self.param_groups[0]["params"]:
            exact = half.float() + self.state[half].get("c", 0.0) - self.param_groups[0]["lr"] * half.grad.float()
            half.copy_(exact)
            self.state[half]["c"] = exact - half.float()


def test_gains_that_short_steps_of_sgd_have_not_moved_yet_are_not_reported_as_frozen() -> None:
    record, net = trained(steps=100, make=lambda net: CompensatedSGD(net.parameters()))
    assert int((net.norm.weight != 1).sum()) <= 2  # the exact ones have moved by less than a unit in the last place
    assert (codes(record), judged(record)) == ([], 0)
    assert record.unseen.notes == (note_of(CompensatedSGD, "it keeps what rounding takes from the half weights"),)
    assert "Healthy: none of 100 steps skipped." in page_of(record)


def test_a_loop_without_optimizer_steps_reports_no_frozen_values() -> None:
    net = Net().to(HALF)
    optimizer = OwnStep(net.parameters())
    with watch(net, optimizer) as watched:
        for loss in losses(net, HALF, 60):
            net.zero_grad()
            loss.backward()
    assert codes(diagnose(watched.record())) == []


def test_the_page_of_a_run_whose_half_updates_were_not_compared_does_not_call_it_healthy() -> None:
    said = "; the updates of 5 half parameters were not compared with FP32."
    record, _ = trained(steps=20, make=own_with_net())
    assert f"No fault found: none of 20 steps skipped{said}" in page_of(record)
    assert record.verdict == "healthy"
    assert "Healthy: none of 20 steps skipped." in page_of(trained(steps=20, make=partial(adamw, lr=3e-2))[0])
    assert said not in page_of(trained(torch.float32, steps=20, make=own_with_net())[0])


class SparseSign(torch.optim.Optimizer):
    """Writes the rows of a table that a batch has read, with the gradient of a copy of these rows."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        table, rows = self.param_groups[0]["params"]
        table[: len(rows)] = (table[: len(rows)].float() - 1e-4 * rows.grad.sign()).to(table.dtype)


@pytest.mark.parametrize(("dtype", "is_unused"), [(HALF, False), (HALF, True), (torch.float32, False)])
def test_half_weights_that_a_step_writes_without_their_gradient_are_not_called_healthy(
    dtype: torch.dtype, is_unused: bool
) -> None:
    table, rows = torch.randn(8, 4).to(dtype), torch.zeros(4, 4, requires_grad=True)
    net = nn.Linear(4, 2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD([table, rows], 1e-3) if is_unused else SparseSign(table, rows),
        torch.optim.SGD(net.parameters(), 1e-3),
    ]
    with watch(net, optimizers) as watched:
        for _ in range(6):
            rows.data.copy_(table[:4])
            net(rows).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    record = diagnose(watched.record())
    note = "ampdbg does not compare updates of tensor 0 of "
    is_left_out = dtype is HALF and not is_unused
    assert [one.startswith(note) for one in record.unseen.notes] == [True] * is_left_out
    said = "; the updates of 1 half parameter were not compared with FP32."
    assert [part in page_of(record) for part in ("No fault found: ", said)] == [is_left_out] * 2


def test_lost_shares_omit_the_loss_forecast_if_some_parameters_are_not_judged() -> None:
    def ended(is_slow: bool) -> Record:
        net = Net().to(HALF)
        optimizer = adamw(net)
        others = [one for one in net.parameters() if one is not net.norm.weight]
        slow = [one.detach().clone() for one in others]

        @torch.no_grad()
        def follow() -> None:
            for one, kept in zip(others, slow, strict=True) if is_slow else ():  # as Lookahead does
                one.copy_(kept.lerp_(one, 0.5))

        return looped(net, optimizer, 60, after=follow)

    record = ended(is_slow=True)
    assert codes(record) == [("frozen-weights", "error")]
    assert "100% in norms and 100% in the 1 of 5 half parameters that could be judged" in record.findings[0].message
    assert "first-order" not in record.findings[0].message
    assert "in all half weights together. By a first-order" in ended(is_slow=False).findings[0].message


# Code of the user that stays unchanged


def test_a_profiler_that_starts_while_a_run_is_sampled_sees_its_steps() -> None:
    called, net = torch.optim.Optimizer._optimizer_step_code, Net().to(HALF)
    optimizer = adamw(net)
    with watch(net, optimizer), torch.profiler.profile(with_stack=True) as profiled:
        assert torch.optim.Optimizer._optimizer_step_code is not called
        for loss in losses(net, HALF, 2):
            loss.backward()
            optimizer.step()
    assert torch.optim.Optimizer._optimizer_step_code is called
    assert optimizer._optimizer_step_post_hooks == {}
    assert sum(event.name == "Optimizer.step#AdamW.step" for event in profiled.events()) == 2


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """All tensors that a window could change, with their ids."""
    for parameter in model.parameters():
        yield id(parameter), parameter
        if parameter.grad is not None:
            yield id(parameter.grad), parameter.grad
    for state in optimizer.state.values():
        yield from ((id(item), item) for item in state.values() if isinstance(item, torch.Tensor))


MAKERS: dict[str, Made] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=1e-3, amsgrad=True),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True),
    "NAdam": lambda net: torch.optim.NAdam(net.parameters(), lr=1e-3),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=1e-3),
    "Adadelta": lambda net: torch.optim.Adadelta(net.parameters(), lr=1e-3),
    "Rprop": lambda net: torch.optim.Rprop(net.parameters(), lr=1e-3),
    "ASGD": lambda net: torch.optim.ASGD(net.parameters(), lr=1e-3),
}


@pytest.mark.parametrize("kind", slow_except(["SGD", "AdamW", "fused"], MAKERS))
def test_a_sampled_run_ends_with_the_same_bits(kind: str, always: None) -> None:
    def ended(is_watched: bool) -> tuple[list[torch.Tensor], Watch]:
        net = Net().to(HALF)
        optimizer = MAKERS[kind](net)
        watched = watch(net, optimizer)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        with watched if is_watched else torch.enable_grad():
            for loss in losses(net, HALF, 23):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        assert all(key in dict(tensors_of(net, optimizer)) for key, _ in tensors_of(net, optimizer))
        return [tensor.detach().clone() for _, tensor in tensors_of(net, optimizer)], watched

    (plain, _), (sampled, watched) = ended(is_watched=False), ended(is_watched=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, sampled, strict=True))
    assert watched.ledger.seen is not None
    assert (watched.ledger.seen.steps, watched.ledger.notes, watched.failure) == (13, (), "")


def test_an_optimizer_whose_entries_depend_on_all_others_is_not_sampled() -> None:
    net = Net().to(HALF)
    optimizer = torch.optim.LBFGS(net.parameters())
    with watch(net, optimizer) as watched:
        for loss in losses(net, HALF, 2):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(lambda loss=loss: loss)
    assert judged(watched.record()) == 0


# Optimizers that are not torch's, or that step whole parameters, compared by twins


class OwnMuon(torch.optim.Optimizer):
    """Steps matrices along the sign of their gradient's largest part, which needs all of it, and vectors like SGD."""

    def __init__(self, parameters: Any, scale: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            way = gradient / gradient.norm() * gradient.numel() ** 0.5 if gradient.ndim == 2 else gradient.sign()
            parameter.sub_(self.param_groups[0]["lr"] * way)


def followed(make: Made, steps: int = 12) -> tuple[Record, float]:
    """A watched run, and the share of float32's way that its half weights have lost. The masters take the same steps
    from the same gradients."""
    net = Net().to(HALF)
    optimizer, masters = make(net), float32_masters(net, lambda those: make(nn.ParameterList(those)))[0]
    began = [one.detach().float().clone() for one in net.parameters()]
    mine = [one for group in masters.param_groups for one in group["params"]]
    theirs = [one for group in optimizer.param_groups for one in group["params"]]

    def step_masters() -> None:
        for master, half in zip(mine, theirs, strict=True):
            master.grad = None if half.grad is None else half.grad.float()
        masters.step()

    record = looped(net, optimizer, steps, before=step_masters)
    start = {id(half): one for half, one in zip(net.parameters(), began, strict=True)}
    wanted = torch.cat([(master - start[id(half)]).flatten() for master, half in zip(mine, theirs, strict=True)])
    got = torch.cat([(half.float() - start[id(half)]).flatten() for half in theirs])
    return record, float(1 - (wanted @ got / (wanted @ wanted)).detach())


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [one for one in net.parameters() if one.ndim == 2]


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (own(lr=5e-5), 5),
        (lambda net: OwnMuon(net.parameters()), 5),
        (lambda net: torch.optim.Adafactor(net.parameters(), lr=1e-3), 5),
        (lambda net: torch.optim.Muon(matrices(net), lr=1e-4), 2),
    ],
    ids=["by-entry", "by-parameter", "Adafactor", "Muon"],
)
def test_what_an_optimizer_loses_is_what_it_loses_beside_float32_masters(make: Made, count: int) -> None:
    if count == 2 and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    record, lost = followed(make)
    assert record.updates is not None
    assert (judged(record), record.unseen.notes) == (count, ())
    assert record.updates.lost == pytest.approx(lost, abs=0.06)
    assert lost > 0.01


def test_gains_that_an_optimizer_of_the_users_freezes_are_an_error_as_with_torchs_own() -> None:
    record, net = trained(steps=20, make=own())
    assert int((net.norm.weight != 1).sum()) == 0
    assert (codes(record)[:1], record.findings[0].parameter) == ([("frozen-weights", "error")], "norm.weight")
    assert "No fault found" not in page_of(record)


class Meddling(OwnStep):
    """Does what must not show if its step runs a second time: it prints, draws or appends."""

    how: str
    taken: list[int]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.how == "prints":
            print("a step")  # noqa: T201 - as a script does
        elif self.how == "draws":
            torch.rand(1)
        elif self.how == "python":
            random.random()
        else:
            self.taken.append(1)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("prints", ""),
        ("python", ""),
        ("appends", ""),
        ("draws", "it draws random numbers"),
    ],
)
def test_a_twin_leaves_no_trace_of_the_step_of_an_optimizer(
    how: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Meddling] = []

    def make(net: nn.Module) -> torch.optim.Optimizer:
        made.append(Meddling(net.parameters(), how=how, taken=[]))
        random.seed(3)
        return made[0]

    record, _ = trained(steps=12, make=make)
    after, drawn = random.getstate(), torch.rand(1)
    assert (judged(record), record.unseen.notes) == ((0, (note_of(Meddling, why),)) if why else (5, ()))
    assert capsys.readouterr().out == "a step\n" * (12 * (how == "prints"))
    assert made[0].taken == [1] * (12 * (how == "appends"))
    random.seed(3)
    for _ in range(12 * (how == "python")):
        random.random()
    assert after == random.getstate()
    Net()  # seeds torch
    for _ in range(12 * (how == "draws")):
        torch.rand(1)
    assert torch.equal(drawn, torch.rand(1))


COUNTED, DRAWN, WRITTEN = {"steps": 0}, random.Random(0), torch.zeros(())


def counting(parameters: Any) -> torch.optim.Optimizer:
    count = 0

    class Counting(OwnStep):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nonlocal count
            count += 1
            super().step()

    return Counting(parameters)


class CountingInItsClass(OwnStep):
    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        CountingInItsClass.count += 1
        super().step()


class CountingInADict(OwnStep):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        COUNTED["steps"] += 1
        super().step()


class Drawing(OwnStep):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 1e-4 * DRAWN.random()
        super().step()


class Writing(OwnStep):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        WRITTEN.add_(1.0)
        super().step()


class Saving(OwnStep):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        torch.save(self.param_groups[0]["lr"], os.devnull)


class Exiting(OwnStep):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["params"][0].requires_grad:
            raise SystemExit(3)
        super().step()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (counting, "its step uses or sets count, which outlives it"),
        (CountingInItsClass, "its step uses an object that outlives it, a type"),
        (CountingInADict, "its step uses an object that outlives it, a dict"),
        (Drawing, "its step uses an object that outlives it, a Random"),
        (Writing, "its step uses an object that outlives it, a Tensor"),
        (Saving, "its step uses or sets save, which outlives it"),
        (Exiting, "on float32 copies it raises SystemExit: 3"),
    ],
)
def test_an_optimizer_whose_step_reaches_what_outlives_it_runs_no_second_time(make: Any, why: str) -> None:
    CountingInItsClass.count = COUNTED["steps"] = 0
    WRITTEN.zero_()
    DRAWN.seed(0)
    record, _ = trained(steps=12, make=lambda net: make(net.parameters()))
    assert judged(record) == 0
    assert [note.partition("float32's: ")[2] for note in record.unseen.notes] == [why]
    assert CountingInItsClass.count == 12 * (make is CountingInItsClass)
    assert COUNTED["steps"] == 12 * (make is CountingInADict)
    assert float(WRITTEN) == 12 * (make is Writing)
    drawn = random.Random(0)
    for _ in range(12 * (make is Drawing)):
        drawn.random()
    assert DRAWN.random() == drawn.random()


class DecayOfMatrices(torch.optim.Optimizer):
    """Decays matrices alone, by less than bfloat16 can hold."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim > 1:
                parameter.mul_(1 - 1.5e-3)
            parameter.sub_(1e-4 * parameter.grad.sign())


def test_a_decay_that_depends_on_the_shape_of_a_parameter_is_part_of_what_is_lost() -> None:
    record, lost = followed(lambda net: DecayOfMatrices(net.parameters()))
    assert record.updates is not None
    assert judged(record) == 5
    assert record.updates.lost == pytest.approx(lost, abs=0.06)


def test_a_learning_rate_of_zero_in_the_first_steps_does_not_hide_that_an_optimizer_compensates() -> None:
    net, rates = Net().to(HALF), iter([0.0] * 3 + [1e-2] * 27)
    optimizer = CompensatedSGD(net.parameters())
    record = looped(net, optimizer, 30, before=lambda: optimizer.param_groups[0].update(lr=next(rates)))
    assert (codes(record), judged(record)) == ([], 0)
    assert record.unseen.notes == (note_of(CompensatedSGD, "it keeps what rounding takes from the half weights"),)


def test_an_optimizer_that_raises_on_float32_copies_is_noted() -> None:
    class Picky(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.01)

        def _init_group(self, group: dict[str, Any], *given: Any) -> bool:
            assert group["params"][0].dtype is HALF, "made for half weights alone"
            return bool(super()._init_group(group, *given))

    record, _ = trained(make=lambda net: Picky(net.parameters()), steps=12)
    assert (codes(record), judged(record)) == ([], 0)
    assert "on float32 copies it raises AssertionError" in record.unseen.notes[0]


def test_the_time_of_windows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_ledger, "SHARE", 0.0)
    record, _ = trained(steps=60)
    assert record.updates is not None
    assert record.updates.steps == update_ledger.WINDOW


def test_parameters_without_a_gradient_in_some_steps_are_sampled_in_others(always: None) -> None:
    net = Net().to(HALF)
    optimizer = adamw(net)
    with watch(net, optimizer) as watched:
        for step, loss in enumerate(losses(net, HALF, 40)):
            optimizer.zero_grad()
            loss.backward()
            if step % 15 == 14:
                net.norm.weight.grad = None
            optimizer.step()
    record = diagnose(watched.record())
    assert codes(record) == [("frozen-weights", "error")]


def test_a_sample_of_a_large_weight_represents_the_whole_weight() -> None:
    net = nn.Linear(512, 256, bias=False).to(HALF)
    optimizer = adamw(net)
    with watch(net, optimizer) as watched:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(8, 512, dtype=HALF)).square().mean().backward()
            optimizer.step()
    updates = watched.record().updates
    assert updates is not None
    begun = net.weight.detach().float().abs()
    assert updates.kinds[0].unmoved == pytest.approx(float((begun > 2.0**-6).float().mean()), abs=0.1)


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("LlamaRMSNorm", "model.layers.0.input_layernorm.weight", "norms"),
        ("LayerNorm", "norm.bias", "norms"),
        ("Linear", "head.bias", "biases"),
        ("Linear", "model.layers.0.self_attn.q_proj.weight", "linears"),
        ("Embedding", "model.embed_tokens.weight", "embeddings"),
        ("Conv2d", "stem.weight", "convolutions"),
        ("Block", "blocks.3.gamma", "other weights"),
    ],
)
def test_parameters_are_grouped_by_the_kind_of_their_module(module: str, name: str, kind: str) -> None:
    assert kind_of(module, name) == kind


# float16, in a scan


HALVES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8).half()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1).half()

    def forward(self, x):
        return self.head(self.norm(self.body(x.half()).float()).half()).float().square().mean()

class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0**-10]).half())

    def forward(self, x):
        return (self.weight * x.half()).float().sum()

def data():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 4, generator=generator) for _ in range(5)]

def ones():
    return [torch.ones(2)]
"""


def scanned(folder: Path, model: str, data: str, optimizer: str, level: str = "O0", **arguments: Any) -> Record:
    config: Config = written(
        folder,
        HALVES,
        model=model,
        data=data,
        optimizer=(optimizer, arguments),
        precision={"level": level},
        train={"steps": 4},
    )
    return diagnose(train(config))


def test_the_lost_share_is_exact_in_a_small_case(tmp_path: Path) -> None:
    # Both weights should fall by 2**-13: too little for the one at 1, where half has steps of 2**-11 downwards.
    half = scanned(tmp_path, "Weight", "ones", "torch.optim:SGD", lr=2.0**-13).updates
    assert half is not None
    assert (half.steps, half.lost, half.lost_decay, half.frozen) == (4, 0.5, None, ())
    none = scanned(tmp_path, "Weight", "ones", "torch.optim:SGD", lr=2.0**-22).updates
    assert none is not None
    assert (none.lost, [(one.name, one.entries, one.moved, one.lost) for one in none.frozen]) == (
        1.0,
        [("weight", 2, 0, 1.0)],
    )


def test_a_vanishing_eps_poisons_float16_weights_and_ends_the_ledger(tmp_path: Path) -> None:
    record = scanned(tmp_path, "Net", "data", "torch.optim:Adam", eps=1e-8)
    seen = record.updates
    assert seen is not None
    assert (seen.steps, seen.spoilt_step, seen.vanishing_eps) == (1, 0, 1e-8)
    assert {"body.weight", "head.bias"} & set(seen.spoilt)
    assert not {"norm.weight", "norm.bias"} & set(seen.spoilt)
    assert codes(record)[0] == ("optimizer-underflow", "error")


def test_a_scan_records_updates_unless_the_scaler_refuses_half_gradients(tmp_path: Path) -> None:
    half = scanned(tmp_path, "Net", "data", "torch.optim:SGD", lr=0.01)
    assert half.updates is not None
    assert (half.updates.steps, len(half.steps), half.misuses) == (4, 4, ())
    refused = scanned(tmp_path, "Net", "data", "torch.optim:SGD", level="O1", lr=0.01)
    assert refused.autocast_error is not None
    assert (refused.autocast_error.code, refused.updates) == ("misuse-half-parameters", None)


@pytest.mark.parametrize("steps", [0, 2])
def test_the_public_watch_has_updates_if_the_optimizer_stepped(steps: int) -> None:
    net = Net().to(HALF)
    optimizer = adamw(net)
    with ampdbg.watch(net, optimizer) as watched:
        for loss in losses(net, HALF, steps):
            loss.backward()
            optimizer.step()
    updates = watched.record().updates
    assert (updates.steps if updates is not None else 0) == steps


# Stored dtypes


def test_the_dtypes_of_each_kind_are_those_of_the_first_step() -> None:
    net = Net().to(HALF)
    net.norm.float()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    with watch(net, optimizer) as watched:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    bfloat16, float32 = (("bfloat16",),) * 3, (("float32",),) * 3
    kinds = {one.kind: (one.stored, one.gradients, one.states) for one in watched.record().dtypes}
    assert kinds == {"linears": bfloat16, "biases": bfloat16, "norms": float32}


def test_the_page_has_a_row_for_each_kind_of_half_weight() -> None:
    record, _ = trained(steps=10)
    page = text_of(record, CommandContext("", ""), PLAIN, "markdown")
    assert "Half weights, in 10 sampled steps" in page
    assert "| kind | lost | of gradient | of decay | still a step | still below lr |" in page
    assert "| norms | 100% | 100% | 100% | 100% |" in page
    html = text_of(record, CommandContext("", ""), PLAIN, "html")
    assert html.count('<rect class="lost" width="100" height="10"/>') == page.count("| 100% ") == 6
    assert from_json(to_json(record)) == record


TRAINER = """
import torch, tests.models.torchvision_on_cpu
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(config).save_pretrained("llama")
model = LlamaForCausalLM.from_pretrained("llama", dtype=torch.{dtype})
data = [{{"input_ids": x, "labels": x}} for x in torch.randint(0, 256, (128, 32))]
arguments = TrainingArguments("out", max_steps=40, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
Trainer(model, arguments, train_dataset=data).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "found"), [("bfloat16", [("frozen-weights", "error")]), ("float32", [])])
def test_run_reports_the_frozen_norms_of_a_bfloat16_llama_in_a_trainer(
    dtype: str, found: list[tuple[str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    record, _, code = run_with_page(tmp_path, TRAINER.format(dtype=dtype), options=())
    assert (codes(record), code) == (found, len(found))
    named = record.findings[0].evidence["parameters"] if found else []
    assert isinstance(named, list)
    assert all("norm" in name for name in named)
