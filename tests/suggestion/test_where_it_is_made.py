"""What is rounded before it reaches the line that goes wrong is kept in FP32 where it is made: p of ``log(1 - p)``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.proof.suggestion import Suggestion, suggest

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)
        nn.init.constant_(self.body.bias, 9.0)

    def forward(self, x):
        return [{"heat": self.body(x)}]


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(0.1 * torch.randn(8, 4, generator=generator), torch.ones(8, 1)) for _ in range(3)]


def probability(x):
    return torch.clamp(x.sigmoid_(), min=1e-4, max=1 - 1e-4)


def focal_loss(p, target):
    return -(torch.log(1 - p) * p**2 * target).mean()


def step(model, batch):
    return focal_loss(probability(model(batch[0])[-1]["heat"]), batch[1])
"""

CONFIG = """\
model: {target: net.py:Net}
data: {target: net.py:batches}
step: {target: net.py:step}
optimizer: {target: torch.optim:SGD, args: {lr: 1.0e-3}}
train: {steps: 3}
"""


def suggested(folder: Path, net: str) -> Suggestion:
    (folder / "net.py").write_text(net)
    (folder / "config.yaml").write_text(CONFIG)
    return suggest(load_config(folder / "config.yaml"))


@pytest.mark.parametrize(
    ("net", "title", "edit"),
    [
        pytest.param(
            NET,
            "probability() on line 29 of net.py",
            "        probability_out = probability(model_out.float())\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            NET.replace("sigmoid_", "sigmoid"),
            "line 21 of net.py",
            "        return torch.clamp(x.float().sigmoid(), min=1e-4, max=1 - 1e-4)\n",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a function that writes into its argument is given another", "its line is edited"],
)
def test_it_is_kept_in_fp32_where_it_is_made(net: str, title: str, edit: str, tmp_path: Path) -> None:
    found = suggested(tmp_path, net)
    assert found.record.verification is not None
    assert found.record.verification.passed
    assert found.record.handover is not None
    (unit,) = found.record.handover.units
    assert unit.title == title
    assert unit.notes[0].startswith("Editing line 25 of net.py alone was not enough: the failing step")
    assert edit in found.edits[0].after.decode()


def test_what_is_made_in_fp32_needs_no_patch(tmp_path: Path) -> None:
    found = suggested(tmp_path, NET.replace('["heat"]', '["heat"].float()'))
    assert (found.record.pins, found.edits) == ((), ())
