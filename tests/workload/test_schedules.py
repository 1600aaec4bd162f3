"""Learning-rate schedules: of a config, and in every shape that ``configure_optimizers`` may return."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ampdbg.config.file import load_config
from ampdbg.errors import UserCodeError, WorkloadError
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from ampdbg.workload.build import Workload
from tests.workload.folders import build

LIGHTNING = """
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

class Module(Net):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        first = torch.optim.SGD([self.head.weight], lr=1.0)
        second = torch.optim.Adam([self.head.bias], lr=1.0)
        halving = StepLR(first, 1, 0.5)
        other = StepLR(second, 1, 0.5)
        each_step = {"scheduler": halving, "interval": "step"}
        plateau = ReduceLROnPlateau(first)
        return RETURNED
"""


def of_module(folder: Path, returned: str) -> Workload:
    return build(folder, "model.target=net.py:Module", net=LIGHTNING.replace("RETURNED", returned))


def rates_after(workload: Workload, steps: int) -> list[float]:
    """The learning rate of each optimizer after so many steps that all take."""
    for _ in range(steps):
        with workload.scheduled():
            for optimizer in workload.optimizers:
                optimizer.step()
    return [optimizer.param_groups[0]["lr"] for optimizer in workload.optimizers]


@pytest.mark.parametrize(
    ("returned", "rates"),
    [
        ("{'optimizer': first, 'lr_scheduler': each_step}", [0.125]),
        ("{'optimizer': first, 'lr_scheduler': {**each_step, 'frequency': 2}}", [0.5]),
        ("[first], [each_step]", [0.125]),
        ("[first, second], [each_step, {'scheduler': other, 'interval': 'step', 'frequency': 3}]", [0.125, 0.5]),
        ("[{'optimizer': first, 'lr_scheduler': each_step}, {'optimizer': second}]", [0.125, 1.0]),
        ("({'optimizer': first}, {'optimizer': second, 'lr_scheduler': None})", [1.0, 1.0]),
        ("first", [1.0]),
    ],
)
def test_what_lightning_steps_after_each_step_is_stepped(tmp_path: Path, returned: str, rates: list[float]) -> None:
    workload = of_module(tmp_path, returned)
    assert workload.notes == ()
    assert rates_after(workload, 3) == rates


OF_MODULE, STAYS = "Module.configure_optimizers()", "the learning rate stays as it is"
EPOCH = f"it waits for the end of an epoch; {STAYS}"


@pytest.mark.parametrize(
    ("returned", "note"),
    [
        ("first, halving", f"the StepLR of {OF_MODULE} is not stepped: {EPOCH}"),
        ("[first], [halving]", f"the StepLR of {OF_MODULE} is not stepped: {EPOCH}"),
        (
            "{'optimizer': first, 'lr_scheduler': {'scheduler': halving, 'interval': 'epoch'}}",
            f"the StepLR of {OF_MODULE} is not stepped: {EPOCH}",
        ),
        (
            "{'optimizer': first, 'lr_scheduler': {'scheduler': plateau, 'interval': 'step', 'monitor': 'loss'}}",
            f"the ReduceLROnPlateau of {OF_MODULE} is not stepped: it waits for the metric of a validation; {STAYS}",
        ),
        (
            "{'optimizer': first, 'lr_scheduler': object()}",
            f"the object of {OF_MODULE} is not stepped: it is no LRScheduler over an optimizer of the run; {STAYS}",
        ),
        (
            "{'optimizer': first, 'lr_scheduler': other}",
            f"the StepLR of {OF_MODULE} is not stepped: it is no LRScheduler over an optimizer of the run; {STAYS}",
        ),
    ],
)
def test_what_waits_for_something_else_is_not_stepped_and_told_of(tmp_path: Path, returned: str, note: str) -> None:
    workload = of_module(tmp_path, returned)
    assert workload.notes == (note,)
    assert rates_after(workload, 3) == [1.0]


@pytest.mark.parametrize("frequency", ["0", "-1", "1.5", "True", "'often'"])
def test_a_frequency_that_is_none_is_refused(tmp_path: Path, frequency: str) -> None:
    with pytest.raises(WorkloadError, match=r"gave the frequency .*; needed: a whole number of at least 1"):
        of_module(tmp_path, f"{{'optimizer': first, 'lr_scheduler': {{**each_step, 'frequency': {frequency}}}}}")


def test_the_configs_scheduler_comes_before_the_models(tmp_path: Path) -> None:
    net = LIGHTNING.replace("RETURNED", "[first, second], [halving]")
    scheduler = "scheduler={target: torch.optim.lr_scheduler:StepLR, args: {step_size: 1, gamma: 0.1}}"
    workload = build(tmp_path, "model.target=net.py:Module", scheduler, net=net)
    assert rates_after(workload, 2) == pytest.approx([0.01, 0.01])


OF_ANOTHER = """
import torch
other = torch.optim.SGD([torch.ones(1)])
def make(optimizer): return torch.optim.lr_scheduler.StepLR(other, 1)
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("make = 3", "is an int; needed: an LRScheduler class, or a function that returns one"),
        ("def make(optimizer): return None", "gave None; needed: an LRScheduler that is stepped after each step"),
        ("from torch.optim.lr_scheduler import ReduceLROnPlateau as make", "without a metric"),
        ("def make(): ...", r"cannot be called with \(optimizer\)"),
        (OF_ANOTHER, "gave a StepLR of another optimizer"),
    ],
)
def test_what_is_no_scheduler_is_refused(tmp_path: Path, source: str, expected: str) -> None:
    with pytest.raises(WorkloadError, match=expected):
        build(tmp_path, "scheduler.target=sched.py:make", sched=f"{source}\n")


# --- in a run ---

NET = """
def huge(model, batch):
    return model(batch[0]).float().sum() * 1e3

def fine(model, batch):
    return model(batch[0]).float().square().mean()

def logged(optimizer):
    class Logged(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch=None):
            super().step()
            with open(LOG, "a") as file:
                print(self.last_epoch, file=file)
    return Logged(optimizer, 1)
"""


def run(folder: Path, step: str, *overrides: str) -> tuple[Record, list[str]]:
    """Trains four steps; also returns what the scheduler logged, its start included."""
    log = folder / "log.txt"
    net = NET.replace("LOG", repr(str(log)))
    build(folder, net=net)
    log.unlink(missing_ok=True)
    given = [f"step.target=net.py:{step}", "loss=null", "scheduler.target=net.py:logged", "train.device=cpu"]
    record = train(load_config(folder / "config.yaml", [*given, "train.steps=4", *overrides]), replays=0)
    return record, log.read_text().split()


@pytest.mark.parametrize("fused", ["null", "true"])
def test_a_step_that_the_scaler_withheld_is_followed_by_none(tmp_path: Path, fused: str) -> None:
    adam = f"optimizer={{target: torch.optim:AdamW, args: {{lr: 1.0e-9, fused: {fused}}}}}"
    record, log = run(tmp_path, "huge", adam, "precision.loss_scale={init: 16}")
    taken = [not step.skipped for step in record.steps]
    assert 0 < sum(taken) < 4
    assert log == [str(number) for number in range(sum(taken) + 1)]
    assert not [misuse for misuse in record.misuses if misuse.code == "misuse-scheduler-on-skip"]


def test_it_is_stepped_in_ranges_and_without_a_scaler(tmp_path: Path) -> None:
    record, log = run(tmp_path, "fine", "precision.dtype=bfloat16")
    assert [step.skipped for step in record.steps] == [False] * 4
    assert log == ["0", "1", "2", "3", "4"]


def test_a_schedule_that_is_over_ends_the_run_as_it_would(tmp_path: Path) -> None:
    over = "scheduler={target: torch.optim.lr_scheduler:OneCycleLR, args: {max_lr: 0.1, total_steps: 2}}"
    with pytest.raises(UserCodeError, match="the learning-rate scheduler's step raised ValueError: Tried to step"):
        run(tmp_path, "fine", over)


def test_no_hook_is_left_on_an_optimizer(tmp_path: Path) -> None:
    workload = build(tmp_path, "scheduler={target: torch.optim.lr_scheduler:StepLR, args: {step_size: 1}}")
    with pytest.raises(RuntimeError, match="in between"), workload.scheduled():
        raise RuntimeError("in between")
    assert not workload.optimizers[0]._optimizer_step_post_hooks
    assert isinstance(workload.optimizers[0], torch.optim.AdamW)
