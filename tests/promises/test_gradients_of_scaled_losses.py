"""Gradients that are sparse, differentiated once more, or added up: each scaled, unscaled, and skipped where it is inf.

The promises are those of "Automatic Mixed Precision examples" in PyTorch's notes.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampdbg
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import WorkloadError
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.watch import watch
from ampdbg.record.run import Record
from tests.promises.scanned import config_of, nonfinite, scanned

SPARSE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, spread=1.0):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)
        self.spread = spread
        nn.init.constant_(self.head.weight, 1.0)

    def forward(self, words):
        return self.head(self.words(words).sum(1) * self.spread)

def data():
    return [torch.tensor([[1, 3, 1], [3, 5, 5]])] * 2

def step(model, batch):
    return model(batch).float().square().mean()

def optimizers(model):
    rest = torch.optim.SGD(model.head.parameters(), lr=0.01)
    return [torch.optim.SparseAdam(model.words.parameters(), lr=0.01), rest]
"""


def sparse(folder: Path, level: str, scale: float = 65536.0, **keys: Any) -> Record:
    precision = {"level": level, "loss_scale": {"init": scale}}
    return scanned(
        folder,
        SPARSE,
        optimizer={"target": "work.py:optimizers"},
        precision=precision,
        train={"steps": 4},
        **keys,
    )


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_a_scan_of_a_sparse_embedding_is_healthy(level: str, tmp_path: Path) -> None:
    record = sparse(tmp_path, level, scale=1024)
    assert (record.verdict, record.findings) == ("healthy", ())
    assert [step.skipped for step in record.steps] == [False] * 4


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.slow)])
def test_an_overflow_behind_a_sparse_embedding_is_named(level: str, tmp_path: Path) -> None:
    record = sparse(tmp_path, level, model={"target": "work.py:Net", "args": {"spread": 60000.0}})
    assert record.findings[0].code == "forward-overflow"
    assert record.findings[0].source is not None
    assert record.findings[0].source.function == "forward"
    assert all(step.skipped for step in record.steps)
    # Rows 1, 3 and 5 of ten were looked up: of the others there is no gradient.
    assert sum(nonfinite(record.steps[0])["words.weight"]) <= 3 * 4


def test_that_torch_clips_no_sparse_gradients_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        WorkloadError, match=r"^train\.clip_grad_norm: torch clips no sparse gradients; leave the key out"
    ):
        scanned(tmp_path, SPARSE, optimizer={"target": "work.py:optimizers"}, train={"steps": 2, "clip_grad_norm": 1.0})


def trained_sparsely(bad: int | None) -> tuple[Any, list[torch.Tensor]]:
    """Four steps of SparseAdam beside AdamW; in one of them row 7 overflows. The embedding after each step."""
    torch.manual_seed(0)
    words, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)
    optimizers = [torch.optim.SparseAdam(words.parameters(), lr=0.01), torch.optim.AdamW(head.parameters(), lr=0.01)]
    scaler, after = torch.amp.GradScaler("cuda", init_scale=1024.0), [words.weight.detach().clone()]
    with watch(nn.ModuleDict({"words": words, "head": head}), optimizers) as watcher:
        for number in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = head(words(torch.tensor([1, 3, 1]))).float().square().mean()
            if number == bad:
                loss = loss + words(torch.tensor([7, 7])).square().sum() * 1e36
            scaler.scale(loss).backward()
            assert words.weight.grad is not None
            scaled = words.weight.grad.coalesce()
            scaler.unscale_(optimizers[0])
            unscaled = words.weight.grad.coalesce()
            assert torch.equal(unscaled.values(), scaled.values() / scaler.get_scale())
            assert unscaled.indices().tolist() == [[1, 3, 7] if number == bad else [1, 3]]
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            after.append(words.weight.detach().clone())
    return diagnose(watcher.record()), after


def test_sparse_adam_steps_on_unscaled_rows() -> None:
    with cuda_on_cpu():
        record, after = trained_sparsely(bad=None)
    assert (record.verdict, [step.skipped for step in record.steps]) == ("healthy", [False] * 4)
    moved = [(now != before).any(1).nonzero().flatten().tolist() for before, now in itertools.pairwise(after)]
    assert moved == [[1, 3]] * 4
    # Adam's first step is the learning rate, whatever the scale was.
    torch.testing.assert_close((after[1] - after[0])[[1, 3]].abs(), torch.full((2, 4), 0.01))


def test_sparse_adam_is_skipped_on_inf_and_the_row_is_counted() -> None:
    with cuda_on_cpu():
        record, after = trained_sparsely(bad=2)
    assert [step.skipped for step in record.steps] == [False, False, True, False]
    assert nonfinite(record.steps[2]) == {"words.weight": (4, 0)}
    assert [torch.equal(now, before) for before, now in itertools.pairwise(after)] == [False, False, True, False]
    assert [(finding.code, finding.severity) for finding in record.findings] == [("scale-calibration", "info")]


LOW = {"loss_scale": {"init": 1024.0}}
"""A scale that these models train at from the first step on."""

PENALTY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(self.inner(x).tanh())

def data():
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)))

def step(model, batch):
    x = batch.requires_grad_()
    out = model(x)
    with torch.autocast("cuda", enabled=False):
        [scaled] = torch.autograd.grad(out.float().sum() * SCALE, x, create_graph=True)
    return out.float().square().mean() + (scaled.float() / SCALE).square().sum()
"""


def test_a_gradient_penalty_that_is_unscaled_by_hand_is_healthy(tmp_path: Path) -> None:
    record = scanned(tmp_path, PENALTY.replace("SCALE", "1024.0"), train={"steps": 6}, precision=LOW)
    assert (record.verdict, record.findings) == ("healthy", ())


@pytest.mark.slow
@pytest.mark.parametrize("scale", [3e6, -3e6])
def test_an_overflow_in_the_gradient_of_a_penalty_is_named_and_cured(scale: float, tmp_path: Path) -> None:
    config = config_of(tmp_path, PENALTY.replace("SCALE", f"({scale})"), train={"steps": 6})
    record = ampdbg.bisect(config)
    finding = record.findings[0]
    assert (finding.code, finding.phase, record.verdict) == ("forward-overflow", "forward", "precision")
    # No loss scale is in it: it is the very number that the code has multiplied by.
    assert finding.evidence["value"] == 3e6
    assert finding.source is not None
    assert finding.source.text.startswith("[scaled] = torch.autograd.grad(out.float().sum()")
    assert {pin.module for pin in record.pins} == {"inner", "outer"}


@pytest.mark.parametrize(("scale", "starts"), [("3e6", 1), ("300.0", 0)])
def test_the_ranges_of_a_penaltys_gradient_are_those_of_the_forward_pass(
    scale: str, starts: int, tmp_path: Path
) -> None:
    record = ampdbg.ranges(config_of(tmp_path, PENALTY.replace("SCALE", scale)))
    inner = [site for site in record.sites if site.source and "torch.autograd.grad(" in site.source.text]
    assert [(site.phase, site.op, site.overflow) for site in inner] == [
        ("forward", "aten._to_copy.default", "starts" if starts else "")
    ]
    assert inner[0].abs_max == pytest.approx(float(scale), rel=2**-8)
    assert [finding.code for finding in record.findings if finding.source == inner[0].source] == (
        ["forward-overflow"] * starts
    )


ACCUMULATED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return self.body(x)

def data(bad=-1):
    made = list(torch.randn(12, 8, 4, generator=torch.Generator().manual_seed(1)))
    if bad >= 0:
        made[bad][0, 0] = 60000.0
    return made

def step(model, batch):
    # Squares beyond FP16 where one entry of the batch is near its end.
    return (model(batch) * batch[:, :1].half()).float().square().mean()
"""


@pytest.mark.parametrize("bad", [-1, 4])
def test_inf_in_one_micro_batch_skips_the_whole_step(bad: int, tmp_path: Path) -> None:
    data = {"target": "work.py:data", "args": {"bad": bad}}
    precision = {"loss_scale": 256}
    record = scanned(tmp_path, ACCUMULATED, data=data, train={"steps": 4, "accumulate": 3}, precision=precision)
    assert [step.skipped for step in record.steps] == [False, bad >= 0, False, False]
    assert [math.isfinite(step.loss) for step in record.steps] == [True, bad < 0, True, True]
    assert [finding.code for finding in record.findings] == (["forward-overflow"] if bad >= 0 else [])
