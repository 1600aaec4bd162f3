"""ampdbg's own loop is in the right order, whatever the workload does that is right; what is wrong in it is named."""

from pathlib import Path
from typing import Any

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.record.run import Record
from ampdbg.training.loop import train
from tests.siblings import slow_except
from tests.written import written

WORKLOAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tests.zoo_misuse.planted import Projection


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh()).squeeze(-1)


class Lit(Net):
    def training_step(self, batch, index):
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(self.body.parameters(), 0.01), torch.optim.Adam(self.head.parameters(), 0.01)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in optimizers]


def data():
    torch.manual_seed(3)
    return [(torch.randn(16, 4), torch.randn(16)) for _ in range(3)]


def two_losses(model, batch):
    out = model(batch[0])
    return {"first": F.mse_loss(out, batch[1]), "second": out.square().mean()}


def penalised(model, batch):
    x = batch[0].requires_grad_()
    loss = F.mse_loss(model(x), batch[1])
    [grad] = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum(1).sqrt().mean()


def checkpointed(model, batch):
    return F.mse_loss(checkpoint(model, batch[0], use_reentrant=False), batch[1])


def overflowing(model, batch):
    return (model.body(batch[0]) * 60000 * 2).float().mean()


def steep(model, batch):
    return F.mse_loss(model(batch[0]), batch[1]) * 1e6


def custom(model, batch):
    return Projection.apply(model(batch[0])[:, None], model.head.weight[:, :1].detach().clone().requires_grad_()).mean()
"""

MSE = "torch.nn.functional:mse_loss"
CLIPPED = {"steps": 6, "accumulate": 3, "clip_grad_norm": 0.1}


def scanned(folder: Path, **keys: Any) -> Record:
    return diagnose(train(written(folder, WORKLOAD, **{"data": "data", "train": {"steps": 6}, "model": "Net", **keys})))


RIGHT: dict[str, dict[str, Any]] = {
    "plain": {"loss": MSE},
    "accumulated and clipped": {"loss": MSE, "train": CLIPPED},
    "bfloat16": {"loss": MSE, "precision": {"dtype": "bfloat16"}, "train": CLIPPED},
    "float32": {"loss": MSE, "precision": {"level": "O0"}, "train": CLIPPED},
    "a static scale of 1": {"loss": MSE, "precision": {"loss_scale": 1}},
    "the device's own policy": {"loss": MSE, "precision": {"policy": "native"}},
    "several optimizers and schedulers": {"model": "Lit", "train": CLIPPED},
    "several losses": {"step": "two_losses", "train": CLIPPED},
    "a gradient penalty": {"step": "penalised"},
    "checkpoints": {"step": "checkpointed"},
    "a loss that overflows": {"step": "overflowing"},
    "gradients that overflow": {"step": "steep", "train": {"steps": 12, "clip_grad_norm": 1.0}},
}


QUICK = ("accumulated and clipped", "float32", "several optimizers and schedulers", "a loss that overflows")


@pytest.mark.parametrize("name", slow_except(QUICK, RIGHT))
def test_scan_and_its_replays_misuse_nothing_themselves(name: str, tmp_path: Path) -> None:
    record = scanned(tmp_path, **RIGHT[name])
    assert record.misuses == ()
    assert len(record.steps) == record.planned_steps
    assert bool(record.investigations) == (name != "float32")


def test_what_a_misuse_raises_is_a_finding_and_no_failure_to_run(tmp_path: Path) -> None:
    record = scanned(tmp_path, step="custom")
    [finding] = record.findings
    assert (finding.code, finding.severity, record.verdict) == ("misuse-custom-function", "error", "other")
    assert finding.source is not None
    assert "misuse-custom-function" in finding.source.text
    assert "torch says: " in finding.message
