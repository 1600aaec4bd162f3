"""``ampdbg run --trend N``: values near FP16's limit are reported early, and the script's numbers are unchanged."""

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
from tests.siblings import slow_except

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


INSIDE = scripts.loop("""
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.gain = nn.Linear(16, 16), 1.0

    def forward(self, x):
        h = self.linear(x)
        OP
        return h / self.gain

net = nn.Sequential(nn.Linear(16, 16), Body(), nn.Linear(16, 1)).cuda()
if "compile" in sys.argv:
    net.compile(backend="eager")
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
data = torch.Generator().manual_seed(0)
for step in range(36):
    net[1].gain = 2e3 + 1.2e3 * step
    x = torch.randn(32, 16, generator=data).cuda()  # the same numbers on every device, whatever a dropout draws
    if step == 10:
        try:
            net[1](x[:, :3])
        except RuntimeError:
            print([mode for mode in torch.overrides._get_current_function_mode_stack() if "trend" in repr(mode)])
    with torch.autocast("cuda"):
        loss = torch.nn.functional.dropout(net(x), 0.1).float().square().mean()
    STEP
print([parameter.detach().double().sum().item() for parameter in net.parameters()])
""")


def inside(folder: Path, line: str, *arguments: str) -> tuple[Result, Record]:
    """Runs a script with an op in its forward pass, and asserts the same numbers as without a watch."""
    script = INSIDE.replace("OP", line)
    result, record = run(folder, script, *arguments, options=("--emulate", "--trend=5", "--html=page.html"))
    assert result.stdout == start(folder, "run", "--emulate", "--no-watch", "train.py", *arguments).stdout
    return result, record


def test_an_op_in_a_forward_pass_is_reported_before_its_output_overflows(tmp_path: Path) -> None:
    result, record = inside(tmp_path, "h = h * self.gain")
    (found,) = record.findings
    assert (found.code, found.severity, found.step, result.code) == ("limit-ahead", "warning", 35, 1)
    assert found.source is not None
    assert (found.module, found.op, found.source.text) == ("1", "mul", "h = h * self.gain")
    largest = found.evidence["value"]
    assert isinstance(largest, float)
    assert 32_752 < largest < 65_504
    shown = f"{largest:,.0f} of mul in 1 (train.py:{found.source.line}) at step 35, is {largest / 65504:.1%} of FP16's"
    for text in (result.stderr, record.unseen.notes[-1], (tmp_path / "page.html").read_text(encoding="utf-8")):
        assert shown in " ".join(text.split()).replace("&#39;", "'").replace(f"{tmp_path}/", "")


SILENT = {
    "far below": "h = h * (self.gain / 10)",
    "a mask": "h = h.masked_fill(h > 1.5, -65504.0).clamp(-1.0)",
    "a mask in some steps": "h = h.masked_fill(x > 3.5, -60000.0).clamp(-1.0)",
    "a constant": "h = h * (torch.full_like(h, 60000.0) / 60000.0)",
    "in FP32": "h = (h.float() * self.gain / self.gain).half()",
}


@pytest.mark.parametrize("how", slow_except(["a mask in some steps"], list(SILENT)))
def test_small_values_mask_constants_and_fp32_values_are_not_reported(how: str, tmp_path: Path) -> None:
    result, record = inside(tmp_path, SILENT[how])
    assert (record.verdict, record.findings, result.code) == ("healthy", (), 0)
    assert record.unseen.notes[-1].startswith("trend: 7 steps sampled, ")


@pytest.mark.slow
def test_only_module_outputs_are_sampled_in_a_compiled_model(tmp_path: Path) -> None:
    _, record = inside(tmp_path, "h = h * self.gain", "compile")
    assert record.unseen.notes[-1].startswith("trend: 7 steps sampled, 0 ops and ")


def test_a_growing_activation_is_reported_before_the_activation_overflows(tmp_path: Path) -> None:
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
def test_flat_or_swinging_activations_are_not_reported(tmp_path: Path, factor: str) -> None:
    result, record = growing(tmp_path, factor, "--trend=5")
    assert (result.code, record.verdict, record.findings) == (0, "healthy", ())
    assert record.trends


@pytest.mark.slow
def test_no_trend_is_sampled_without_the_trend_option(tmp_path: Path) -> None:
    _, record = growing(tmp_path, "1.05 ** step")
    assert (record.trends, record.findings) == ((), ())


def test_a_long_run_keeps_few_samples_and_leaves_no_hook() -> None:
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
