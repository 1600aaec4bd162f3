"""``ampdbg run --trend N``: what grows is told of ahead of time, at no cost to the script's numbers."""

from pathlib import Path

import pytest
import torch

from ampdbg.api import read
from ampdbg.probes.trend import MOST_KEPT, MOST_SAMPLES, TrendSamples
from ampdbg.probes.watch import watch
from ampdbg.record.run import Record
from tests.commands.program import Result, start
from tests.script import scripts
from tests.script.test_run import run

GROWING = scripts.loop("""
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(16, 16), 1.0

    def forward(self, x):
        return self.linear(x) * self.factor

net = nn.Sequential(nn.Linear(16, 16), Body(), nn.Linear(16, 1)).cuda()
nn.init.normal_(net[2].weight, std=1e-3)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
for step in range(150):
    net[1].factor = FACTOR
    x = torch.randn(32, 16, device="cuda")
    with torch.autocast("cuda"):
        loss = torch.nn.functional.dropout(net(x), 0.1).float().square().mean() * 1e-3
    STEP
print([parameter.detach().double().sum().item() for parameter in net.parameters()])
""")


def growing(folder: Path, factor: str, *options: str) -> tuple[Result, Record]:
    return run(folder, GROWING.replace("FACTOR", factor), options=("--emulate", *options))


def test_an_activation_that_grows_is_told_of_before_it_overflows(tmp_path: Path) -> None:
    result, record = growing(tmp_path, "1.05 ** step", "--trend=5")
    assert result.stdout == start(tmp_path, "run", "--emulate", "--no-watch", "train.py").stdout
    (found,) = record.findings
    assert (found.code, found.severity, found.module, result.code) == ("limit-ahead", "warning", "1", 1)
    reached = found.evidence["reached_at"]
    assert isinstance(reached, int)
    assert 180 < reached < 250
    assert "would reach FP16's limit" in " ".join(result.stderr.split())
    assert len(record.trends) == MOST_KEPT
    assert record.trends[0].steps == tuple(range(5, 150, 5))
    assert read(tmp_path / "r.jsonl").trends == record.trends


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["1.0", "2 ** (step % 40 / 10)"], ids=["flat", "swings"])
def test_its_healthy_twins_are_silent(tmp_path: Path, factor: str) -> None:
    result, record = growing(tmp_path, factor, "--trend=5")
    assert (result.code, record.verdict, record.findings) == (0, "healthy", ())
    assert record.trends


@pytest.mark.slow
def test_nothing_is_sampled_unless_it_is_asked_for(tmp_path: Path) -> None:
    _, record = growing(tmp_path, "1.05 ** step")
    assert (record.trends, record.findings) == ((), ())


def test_a_long_run_has_few_samples_and_no_hook_is_left() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with watch(net, optimizer) as watcher:
        samples = TrendSamples(watcher, 1)
        watcher.ended = lambda is_bad: samples.step_ended()
        for _ in range(200):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.ones(2, 4)).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        samples.end()
    trends = {(trend.kind, trend.name): trend for trend in samples.seen()}
    assert set(trends) == {
        *(("activation", name) for name in ("", "0", "1")),
        *(("gradient", name) for name in ("0.weight", "0.bias", "1.weight", "1.bias")),
        ("scale", ""),
    }
    assert all(8 < len(trend.steps) <= MOST_SAMPLES for trend in trends.values())
    assert trends["gradient", "1.bias"].values == pytest.approx([1.0] * len(trends["gradient", "1.bias"].steps))
    assert trends["scale", ""].values[0] == 8.0
    assert not torch.nn.modules.module._global_forward_hooks


def test_gradients_that_another_optimizer_has_unscaled_are_not_measured_again() -> None:
    nets = [torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 1, bias=False)]
    model = torch.nn.ModuleList(nets)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-9) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    with watch(model, optimizers) as watcher:
        samples = TrendSamples(watcher, 1)
        watcher.ended = lambda is_bad: samples.step_ended()
        for _ in range(12):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(net(torch.ones(2, 4)).sum()).backward()
                scaler.step(optimizer)
            scaler.update()
        samples.end()
    trends = {trend.name: trend for trend in samples.seen() if trend.kind == "gradient"}
    assert {name: set(trend.values) for name, trend in trends.items()} == {"0.weight": {2.0}, "1.weight": {2.0}}
