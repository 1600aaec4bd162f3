"""Runs that continue from a training checkpoint match an uninterrupted run bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg.api import scan, suggest_fp32
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes.watch import watch
from ampdbg.record.run import Record, Step
from ampdbg.replay.run import Run, prepared
from ampdbg.training.fp32_twin import fp32_losses
from ampdbg.training.loop import accumulate_gradients, batches_of_steps, take_step, train
from tests.script import scripts
from tests.siblings import slow_except
from tests.written import written

WORKLOAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).relu())

def data(start=0):
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(16, 6, generator=generator), torch.randn(16, 1, generator=generator)) for _ in range(40)]
    return batches[start:]

def loss(output, target):
    return (output.float() - target).square().mean()

def two(model):
    return [torch.optim.AdamW(model.body.parameters(), lr=0.03), torch.optim.SGD(model.head.parameters(), 0.1, 0.9)]

def warming(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight

def ones():
    return [(torch.ones(4, 4), torch.zeros(4, 4))]

def large(model, batch):
    return (3e4 * batch[0].half() * model.weight.half()).float().mean() * 1e-8

def faint(model, batch):
    return (batch[0].half() * model.weight.half()).float().mean() * 1e-5
"""

BEFORE, AFTER = 7, 8
QUICK = ("two optimizers", "O3 in bfloat16")


def config(folder: Path, *overrides: str, **keys: Any) -> Any:
    train = {"device": "cpu", "steps": BEFORE + AFTER}
    return written(
        folder, WORKLOAD, *overrides, **{"model": "Net", "data": "data", "loss": "loss", "train": train, **keys}
    )


def checkpoint_after(checked: Any, steps: int) -> dict[str, Any]:
    """The checkpoint of a script that trained as the config says."""
    with prepared(checked) as run:
        scaler, every = run.scaler(), batches_of_steps(run)
        with watch(run.workload.model, run.workload.optimizers) as watcher:
            for _ in range(steps):
                accumulate_gradients(run, watcher, scaler, next(every))
                take_step(run, scaler)
        return saved(run, scaler)


def saved(run: Run, scaler: torch.amp.GradScaler) -> dict[str, Any]:
    workload = run.workload
    return {
        "model": workload.model.state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in workload.optimizers],
        "scaler": scaler.state_dict(),
        "scheduler": [schedule.scheduler.state_dict() for schedule in workload.schedules],
    }


def numbers(steps: tuple[Step, ...]) -> list[tuple[float, float, float | None, bool]]:
    return [(step.loss, step.scale, step.grad_norm, step.skipped) for step in steps]


# The scale grows every third step, and a step at 2**17 is skipped.
SCALE = {"loss_scale": {"init": 65536, "growth_interval": 3}}
VARIANTS: dict[str, dict[str, Any]] = {
    "AdamW": {"precision": SCALE},
    "SGD": {"precision": SCALE, "optimizer": ("torch.optim:SGD", {"lr": 0.1, "momentum": 0.9})},
    "two optimizers": {"precision": SCALE, "optimizer": "two"},
    "a scheduler": {"precision": SCALE, "scheduler": "warming"},
    "a one-cycle schedule": {"scheduler": ("torch.optim.lr_scheduler:OneCycleLR", {"max_lr": 0.1, "total_steps": 15})},
    "a scheduler and two optimizers": {"optimizer": "two", "scheduler": "warming"},
    "bfloat16": {"precision": {"dtype": "bfloat16"}},
    "O3 in bfloat16": {"precision": {"level": "O3", "dtype": "bfloat16"}},
    "RMSprop": {"optimizer": ("torch.optim:RMSprop", {"lr": 0.01, "centered": True})},
}


@pytest.mark.parametrize("name", slow_except(QUICK, VARIANTS))
def test_a_run_continued_from_a_checkpoint_equals_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    whole = config(tmp_path, **VARIANTS[name])
    torch.save(checkpoint_after(whole, BEFORE), tmp_path / "run.pt")
    uninterrupted = train(whole, replays=0)
    rest = [f"train.steps={AFTER}", f"data.args.start={BEFORE}", "checkpoint=run.pt"]
    continued = train(config(tmp_path, *rest, **VARIANTS[name]), replays=0)
    assert numbers(continued.steps) == numbers(uninterrupted.steps[BEFORE:])
    anew = train(config(tmp_path, *rest, "checkpoint={model: run.pt}", **VARIANTS[name]), replays=0)
    assert numbers(anew.steps) != numbers(continued.steps)


def test_a_run_continues_from_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    whole = config(tmp_path, **VARIANTS["a scheduler"])
    content = checkpoint_after(whole, BEFORE)
    torch.save(content["model"], tmp_path / "pytorch_model.bin.pt")
    torch.save(content["optimizer"][0], tmp_path / "optimizer.pt")
    torch.save(content["scaler"], tmp_path / "scaler.pt")
    torch.save(content["scheduler"][0], tmp_path / "scheduler.pt")
    files = "{model: pytorch_model.bin.pt, optimizer: optimizer.pt, scaler: scaler.pt, scheduler: [scheduler.pt]}"
    rest = [f"train.steps={AFTER}", f"data.args.start={BEFORE}", f"checkpoint={files}"]
    continued = train(config(tmp_path, *rest, **VARIANTS["a scheduler"]), replays=0)
    assert numbers(continued.steps) == numbers(train(whole, replays=0).steps[BEFORE:])


def test_an_fp32_twin_continues_from_a_checkpoint(tmp_path: Path) -> None:
    fp32 = {"precision": {"level": "O0"}, "scheduler": "warming"}
    whole = config(tmp_path, **fp32)
    torch.save(checkpoint_after(whole, BEFORE), tmp_path / "run.pt")
    rest = [f"train.steps={AFTER}", f"data.args.start={BEFORE}", "checkpoint=run.pt"]
    assert fp32_losses(config(tmp_path, *rest, **fp32)) == fp32_losses(whole)[BEFORE:]


# Failures that need the optimizer or scaler state of the checkpoint


def scanned(folder: Path, *overrides: str, **keys: Any) -> Record:
    return diagnose(train(config(folder, *overrides, **keys)))


LINE = {"model": "Line", "data": "ones"}
GROUP = {"lr": 1.0, "momentum": 0.99, "dampening": 0, "weight_decay": 0, "nesterov": False, "params": [0]}


def test_an_overflow_that_needs_the_momentum_of_the_checkpoint_is_found(tmp_path: Path) -> None:
    # The momentum moves the weight from 1 to 3 within two steps, and 30,000 times 3 is beyond FP16.
    state = {"state": {0: {"momentum_buffer": torch.full((4,), -1.0)}}, "param_groups": [GROUP]}
    torch.save({"model": {"weight": torch.ones(4)}, "optimizer": state}, tmp_path / "run.pt")
    sgd = ("torch.optim:SGD", {"lr": 1.0, "momentum": 0.99})
    keys = {**LINE, "loss": None, "step": "large", "optimizer": sgd, "train": {"device": "cpu", "steps": 4}}
    assert scanned(tmp_path, "checkpoint={model: run.pt}", **keys).verdict == "healthy"
    warm = scanned(tmp_path, "checkpoint=run.pt", **keys)
    assert (warm.verdict, warm.findings[0].code, warm.findings[0].step) == ("precision", "forward-overflow", 2)


@pytest.mark.slow
def test_a_collapsed_loss_scale_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-8).state_dict()
    torch.save({"model": {"weight": torch.ones(4)}, "scaler": scaler}, tmp_path / "run.pt")
    keys = {**LINE, "loss": None, "step": "faint", "train": {"device": "cpu", "steps": 6}}
    assert scanned(tmp_path, "checkpoint={model: run.pt}", **keys).verdict == "healthy"
    warm = scanned(tmp_path, "checkpoint=run.pt", **keys)
    assert [step.scale for step in warm.steps] == [2.0**-8] * 6
    assert warm.verdict == "precision"
    static = scanned(tmp_path, "checkpoint=run.pt", "precision.loss_scale=1024", **keys)
    assert {step.scale for step in static.steps} == {1024.0}


LEARNT = "self.gain = nn.Linear(16, 16), nn.Parameter(torch.tensor(gain))"
ATTENTION = scripts.PLAIN.partition("def main(")[0].replace("self.gain = nn.Linear(16, 16), gain", LEARNT) + (
    """
def data():
    torch.manual_seed(1)
    return [(torch.randn(8, 5, 16), torch.randint(4, (8,))) for _ in range(30)]
"""
)


@pytest.mark.slow
def test_a_patch_is_proven_if_the_failing_step_needs_the_checkpoint_momentum(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model": ("Net", {"gain": 16.0}), "data": "data"}
    keys["loss"], keys["train"] = "torch.nn.functional:cross_entropy", {"steps": 30, "device": "cpu"}
    keys["optimizer"] = ("torch.optim:SGD", {"lr": 1e-4, "momentum": 0.9})
    keys["scheduler"] = ("torch.optim.lr_scheduler:LinearLR", {"start_factor": 0.5, "total_iters": 10})
    with prepared(written(tmp_path, ATTENTION, **keys)) as run:
        with watch(run.workload.model, run.workload.optimizers) as watcher:
            accumulate_gradients(run, watcher, torch.amp.GradScaler("cpu", enabled=False), next(batches_of_steps(run)))
            take_step(run, torch.amp.GradScaler("cpu", enabled=False))
        (optimizer,) = run.workload.optimizers
        optimizer.state[run.workload.model.get_parameter("attention.gain")]["momentum_buffer"].fill_(-4e5)
        torch.save(saved(run, torch.amp.GradScaler("cpu", init_scale=2.0**17)), tmp_path / "run.pt")
    written(tmp_path, ATTENTION, checkpoint="run.pt", **keys)
    assert scan(tmp_path / "config.yaml", overrides=["checkpoint={model: run.pt}"]).verdict == "healthy"
    record = suggest_fp32(tmp_path / "config.yaml")
    assert (record.findings[0].code, record.findings[0].module) == ("forward-overflow", "attention")
    assert record.steps[0].scale == 2.0**17
    assert record.verification is not None
    assert record.verification.failure == ""
    assert record.verification.passed
