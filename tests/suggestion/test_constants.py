"""A constant that half cannot hold: the patch keeps it in range on its line, and takes no module into FP32."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.proof import proof
from ampdbg.proof.experiments import perform
from ampdbg.proof.suggestion import suggest
from ampdbg.report.suggestion import content
from tests.zoo.test_zoo import FILES, config_of

ADDED = {
    "mask_constant": "scores = scores.masked_fill(hidden, max(self.fill, torch.finfo(scores.dtype).min))  # <- here",
    "mask_of_a_whole_row": "mask = hidden * max(self.fill, torch.finfo(hidden.dtype).min / 2)  # <- here",
    "eps_in_the_backward_pass": (
        "length = torch.sqrt((h * h).amax(dim=-1, keepdim=True) + max(self.eps, torch.finfo(h.dtype).tiny))  # <- here"
    ),
    "eps_on_a_zero_row": (
        "h = h / (h.abs().amax(dim=-1, keepdim=True) + max(self.eps, torch.finfo(h.dtype).tiny))  # <- here"
    ),
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started for the proof: it takes seconds to start one."""
    monkeypatch.setattr(proof, "fresh_processes", lambda folder: contextlib.nullcontext(perform))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDED)
def test_the_constant_is_kept_in_range_on_its_line(name: str, tmp_path: Path) -> None:
    file = next(file for file in FILES if file.stem == name)
    record = suggest(load_config(config_of(file, tmp_path))).record
    assert record.verification is not None
    assert record.verification.passed, record.verification
    lines = (content(record) or b"").decode().splitlines()
    assert lines[0] == "# Keeps constants within the range of half precision; no module needs FP32:"
    added = [line.removeprefix("+").strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert added == [ADDED[name]]
    assert record.pins  # FP32 would cure it too, and is what a file of pins holds


def test_unproven_it_is_no_better_than_the_pins_that_the_search_has_tried(tmp_path: Path) -> None:
    file = next(file for file in FILES if file.stem == "mask_of_a_whole_row")
    record = suggest(load_config(config_of(file, tmp_path)), verify=False).record
    assert record.handover is not None
    assert record.handover.files
    assert not record.handover.pins_nothing


SMALL = """
import torch
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-8)

class Net(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(16, 16), Norm(), nn.Linear(16, 4)
        self.head.weight.data *= 0.01

    def forward(self, x):
        return self.head(self.norm(self.body(x) * SIZE))

def data():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(8)]

def loss(model, batch):
    return (model(batch[0]).float() - batch[1]).pow(2).mean()
"""


@pytest.mark.slow
def test_an_eps_that_half_would_drown_the_values_in_is_not_raised(tmp_path: Path) -> None:
    """FP32's own values are smaller there than any eps that FP16 holds: the loss hardly tells, the gradients do."""
    (tmp_path / "w.py").write_text(SMALL.replace("SIZE", "1e-4"), encoding="utf-8")
    settings = "model: {target: w.py:Net}\ndata: {target: w.py:data}\nstep: {target: w.py:loss}\ntrain: {steps: 3}\n"
    (tmp_path / "c.yaml").write_text(settings, encoding="utf-8")
    record = suggest(load_config(tmp_path / "c.yaml")).record

    assert record.findings[0].code == "eps-underflow"
    assert record.verification is not None
    assert record.verification.passed, record.verification
    patch = (content(record) or b"").decode()
    assert "finfo" not in patch
    assert "autocast" in patch
    assert "divides by a value that FP16 rounds to zero" in record.pins[0].without
    assert "reaches" not in patch
