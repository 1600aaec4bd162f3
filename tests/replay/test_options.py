"""Every two options of a config go together: each pair is scanned and its ranges are measured."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.training.loop import profile_ranges, train
from tests.siblings import slow_but_for
from tests.written import written

WORKLOAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, factor=1e6):
        super().__init__()
        self.factor, self.body, self.head = factor, nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.head((self.body(x).half() * self.factor).float())

def data():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(4)]

def step(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def several(model, batch):
    return {"fit": step(model, batch), "size": model.head.weight.square().sum()}

def two(model, fused=False, groups=None):
    return [torch.optim.AdamW(part.parameters(), fused=fused) for part in (model.body, model.head)]
"""

OPTIONS = {
    "accumulate": "train.accumulate=2",
    "clip": "train.clip_grad_norm=1.0",
    "several losses": "step.target=work.py:several",
    "two optimizers": "optimizer.target=work.py:two",
    "fused": "optimizer.args.fused=true",
    "static scale": "precision.loss_scale=128",
    "bfloat16": "precision.dtype=bfloat16",
    "O0": "precision.level=O0",
    "native": "precision.policy=native",
    "groups": "optimizer.groups=module",
    "pins": "precision.pins=[body]",
    "healthy": "model.args.factor=1.0",
}


PAIRS = list(combinations(OPTIONS, 2))
TWO_BY_TWO = list(zip(*[iter(OPTIONS)] * 2, strict=True))
"""Each option once."""


@pytest.mark.parametrize("names", slow_but_for(TWO_BY_TWO, PAIRS), ids=" and ".join)
def test_two_options_go_together(names: tuple[str, str], tmp_path: Path) -> None:
    train_keys = {"steps": 2, "device": "cpu"}
    overrides = [OPTIONS[name] for name in names]
    config = written(tmp_path, WORKLOAD, *overrides, model="Net", data="data", step="step", train=train_keys)
    record = diagnose(train(config))
    assert len(record.steps) == 2
    assert not any(replay.error for made in record.investigations for replay in made.replays)
    assert (record.verdict == "healthy") == ("healthy" in names)
    ranges = profile_ranges(config)
    assert {site.phase for site in ranges.sites} == {"forward", "backward"}
