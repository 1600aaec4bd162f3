"""Loops with several losses and optimizers, replicas in threads, and a scaler that is saved and loaded again.

The promises are those of "Automatic Mixed Precision examples" in PyTorch's notes.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.watch import watch
from ampdbg.record.run import Record, Step
from tests.promises.scanned import nonfinite, scanned


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


def two_models(bad: int | None) -> tuple[Record, list[tuple[bool, bool]]]:
    """Two losses over two models, two optimizers, one scaler; in one step the second loss overflows.

    Returns what was seen, and of each step whether the first and the second model moved.
    """
    torch.manual_seed(0)
    models = nn.ModuleDict({"calm": nn.Linear(4, 4), "steep": nn.Linear(4, 1)})
    calm, steep = models["calm"], models["steep"]
    optimizers = [torch.optim.SGD(calm.parameters(), lr=0.01), torch.optim.AdamW(steep.parameters(), lr=0.01)]
    moved = []
    with cuda_on_cpu(), watch(models, optimizers) as watcher:
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for number, x in enumerate(torch.randn(4, 8, 4)):
            before = [flat(calm), flat(steep)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cuda"):
                first = 2 * calm(x).float().square().mean()
                second = steep(calm(x).detach()).float().square().mean()
            scaler.scale(first).backward()
            scaler.scale(second * (1e36 if number == bad else 1.0)).backward()
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            assert watcher.steps[-1].loss == pytest.approx((first + second).item()) or number == bad
            after = [flat(calm), flat(steep)]
            moved.append((not torch.equal(before[0], after[0]), not torch.equal(before[1], after[1])))
    return diagnose(watcher.record()), moved


def test_each_optimizer_decides_for_itself_whether_to_skip() -> None:
    healthy, moved = two_models(bad=None)
    assert (healthy.verdict, healthy.findings, moved) == ("healthy", (), [(True, True)] * 4)
    record, moved = two_models(bad=2)
    assert moved == [(True, True), (True, True), (True, False), (True, True)]
    assert [step.skipped for step in record.steps] == [False, False, True, False]
    assert [step.scale for step in record.steps] == [1024.0] * 3 + [512.0]
    assert record.groups == ("group 0", "group 1")
    assert [group.index for group in record.steps[2].groups] == [1]
    assert nonfinite(record.steps[2]).keys() == {"steep.weight", "steep.bias"}
    assert record.misuses == ()


TWO_LOSSES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.calm, self.steep, self.gain = nn.Linear(4, 1), nn.Linear(4, 1), gain

    def forward(self, x):
        return self.calm(x), self.steep(x) * self.gain

def data():
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)))

def step(model, batch):
    calm, steep = model(batch)
    return {"calm": calm.float().square().mean(), "steep": steep.float().abs().mean()}

def optimizers(model):
    return [torch.optim.SGD(model.calm.parameters(), lr=0.1), torch.optim.AdamW(model.steep.parameters(), lr=0.01)]
"""


@pytest.mark.parametrize("gain", [1.0, 60000.0])
def test_a_scan_names_the_loss_that_overflows_and_the_other_goes_on(gain: float, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer": {"target": "work.py:optimizers"}, "train": {"steps": 4}}
    model = {"target": "work.py:Net", "args": {"gain": gain}}
    record = scanned(tmp_path, TWO_LOSSES, model=model, precision={"loss_scale": {"init": 1024.0}}, **keys)
    calm = [step.losses["calm"] for step in record.steps]
    assert len(set(calm)) == 4
    if gain == 1.0:
        assert (record.verdict, record.findings) == ("healthy", ())
        return
    assert record.findings[0].code == "forward-overflow"
    assert record.findings[0].source is not None
    assert record.findings[0].source.text == "return self.calm(x), self.steep(x) * self.gain"
    assert [set(nonfinite(step)) for step in record.steps] == [{"steep.weight", "steep.bias"}] * 4


class Noting(nn.Module):
    """Notes the dtype that each thread's forward pass computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.seen: dict[int, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        self.seen[threading.get_ident()] = y.dtype
        return y.float()


def replica_of(model: Noting) -> Noting:
    """As ``replicate`` makes them: its weights are no leaves, so that their gradients add up in the model's own."""
    replica = copy.copy(model)
    replica._modules = {"body": copy.deepcopy(model.body)}
    for name, weight in model.body.named_parameters():
        del replica.body._parameters[name]
        setattr(replica.body, name, weight.clone())
    return replica


def on_replicas(model: Noting, chunks: list[torch.Tensor]) -> torch.Tensor:
    """What DataParallel does, without its devices: a replica and a thread for each chunk.

    ``replicate`` copies to GPUs alone, and ``parallel_apply`` asks for their streams: neither runs on a CPU. As there,
    each thread enters autocast if its caller has.
    """
    results: dict[int, torch.Tensor] = {}
    enabled = torch.is_autocast_enabled("cuda")

    def run(at: int, replica: Noting) -> None:
        with torch.autocast("cuda", enabled=enabled):
            results[at] = replica(chunks[at])

    threads = [threading.Thread(target=run, args=(at, replica_of(model))) for at in range(len(chunks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([results[at] for at in range(len(chunks))])


def test_replicas_in_threads_compute_in_half_and_their_gradients_add_up_in_float32() -> None:
    torch.manual_seed(0)
    model, chunks = Noting(), list(torch.randn(2, 8, 4))
    alone: list[torch.Tensor] = []
    with cuda_on_cpu():
        for chunk in chunks:
            with torch.autocast("cuda"):
                loss = model(chunk).square().sum()
            alone += torch.autograd.grad(loss, model.body.weight)
        model.seen.clear()
        with torch.autocast("cuda"):
            output = on_replicas(model, chunks)
        output.square().sum().backward()
    assert set(model.seen.values()) == {torch.float16}
    assert model.body.weight.grad is not None
    assert all(torch.equal(gradient, gradient.half().float()) for gradient in alone)
    assert torch.equal(model.body.weight.grad, alone[0] + alone[1])


def test_the_state_of_autocast_is_each_threads_own() -> None:
    model = Noting()
    with cuda_on_cpu(), torch.autocast("cuda"):
        thread = threading.Thread(target=model, args=(torch.randn(2, 4),))
        thread.start()
        thread.join()
        model(torch.randn(2, 4))
    assert set(model.seen.values()) == {torch.float32, torch.float16}
    assert model.seen[threading.get_ident()] is torch.float16


@pytest.mark.parametrize("bad", [None, 1])
def test_inf_on_one_replica_skips_the_step_of_all(bad: int | None) -> None:
    torch.manual_seed(0)
    model = Noting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with cuda_on_cpu(), watch(model, optimizer) as watcher:
        scaler, chunks = torch.amp.GradScaler("cuda", init_scale=128.0), list(torch.randn(2, 8, 4))
        if bad is not None:
            chunks[bad][0] = 60000.0
            torch.nn.init.constant_(model.body.weight[1], 1.0)
        before = flat(model)
        with torch.autocast("cuda"):
            loss = on_replicas(model, chunks).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    [step] = watcher.steps
    assert (step.skipped, torch.equal(flat(model), before)) == (bad is not None, bad is not None)
    assert nonfinite(step).keys() == ({"body.weight", "body.bias"} if bad is not None else set())


def test_data_parallel_on_one_device_is_its_module(tmp_path: Path) -> None:
    code = f"{TWO_LOSSES}\ndef build():\n    return nn.DataParallel(Net(60000.0))\n"
    record = scanned(tmp_path, code, model={"target": "work.py:build"}, train={"steps": 2})
    assert (record.findings[0].code, record.findings[0].module) == ("forward-overflow", "module")


def resumable(saved: dict[str, Any] | None, steps: range) -> tuple[Record, dict[str, Any]]:
    """Steps of one loop, from the start or from a checkpoint; in step 4 the loss overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with cuda_on_cpu():
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scaler.load_state_dict(saved["scaler"])
        batches = torch.randn(10, 8, 4, generator=torch.Generator().manual_seed(5))
        with watch(model, optimizer) as watcher:
            for number in steps:
                optimizer.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(batches[number]).float().square().mean()
                scaler.scale(loss * (1e36 if number == 4 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    return diagnose(watcher.record()), state


def shown(step: Step) -> str:
    """All but its number; in text, where NaN is NaN."""
    return repr(replace(step, step=0))


@pytest.mark.parametrize("at", [2, 4, 5])
def test_a_scaler_that_is_saved_and_loaded_goes_on_bit_for_bit(at: int, tmp_path: Path) -> None:
    whole, end = resumable(None, range(8))
    _, middle = resumable(None, range(at))
    torch.save(middle, tmp_path / "checkpoint.pt")
    rest, resumed = resumable(torch.load(tmp_path / "checkpoint.pt", weights_only=True), range(at, 8))
    assert all(torch.equal(end["model"][name], resumed["model"][name]) for name in end["model"])
    assert end["scaler"] == resumed["scaler"]
    assert list(map(shown, rest.steps)) == list(map(shown, whole.steps[at:]))
    assert [step.scale for step in whole.steps] == [1024.0] * 3 + [2048.0] * 2 + [1024.0] * 3
