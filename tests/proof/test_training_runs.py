"""A run with the patch disproves it only by what fails in it: what its loss scale went through is a caveat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.observer import UNOBSERVED
from ampdbg.proof.experiments import trained_with_the_patch
from ampdbg.proof.jobs import Job, Patched, Trained, Tried
from ampdbg.replay.pinned_replays import ScaleRange

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x):
        {forward}


def batches():
    return [{gain} * torch.ones(1, 4) for step in range(60)]


def step(model, x):
    return model(x).float().sum()
"""

CONFIG = """\
model: {target: net.py:Net}
data: {target: net.py:batches}
step: {target: net.py:step}
optimizer: {target: torch.optim:SGD, args: {lr: 1.0e-9}}
"""


@dataclass(frozen=True)
class Case:
    """A run of 60 steps: the loss from a batch of ones, and what the batch of a step is multiplied by."""

    forward: str = "return self.a(x)"
    gain: str = "1.0"
    scale: float = 65536.0


GROWS = "1.5 * 2.0 ** min(max(0, step - 20) // 2, {most})"
CAVEATS = {
    "gradients that grow take a few skips": (Case(gain=GROWS.format(most=4), scale=32768.0), ()),
    "a large loss needs a scale below 1": (Case("return self.a(x).float() * 1e6", scale=4.0), ("scale-runaway",)),
}
FAULTS = {
    "gradients that grow to the end": (Case(gain=GROWS.format(most=60), scale=32768.0), "gradient-overflow: "),
}


def trained(case: Case, folder: Path) -> Trained:
    (folder / "net.py").write_text(NET.replace("{forward}", case.forward).replace("{gain}", case.gain))
    (folder / "config.yaml").write_text(CONFIG)
    config = load_config(folder / "config.yaml", [f"precision.loss_scale.init={case.scale}", "train.device=cpu"])
    job = Job("patched", config, Patched(), (ScaleRange(4.0),), is_silent=False, train_steps=60)
    healthy = Tried(step=0, healthy=True, why="", loss=1.0, scale=case.scale, fp32_loss=1.0, fp32_grad_norm=1.0)
    return trained_with_the_patch(job, [healthy], UNOBSERVED)


@pytest.mark.parametrize("name", CAVEATS)
def test_a_caveat_is_told_and_does_not_disprove_the_patch(name: str, tmp_path: Path) -> None:
    case, beside = CAVEATS[name]
    run = trained(case, tmp_path)
    assert (run.failure, run.faults) == ("", ())
    assert set(run.beside) >= set(beside)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_its_twin_does(name: str, tmp_path: Path) -> None:
    case, start = FAULTS[name]
    run = trained(case, tmp_path)
    assert run.failure == ""
    assert [fault for fault in run.faults if fault.startswith(start)]
