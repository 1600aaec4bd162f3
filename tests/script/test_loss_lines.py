"""Lines of a script's own loss that overflow, outside of any module: edited, and the edit is proven in the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import start
from tests.script.test_run import run

LOSSES = """\
import sys, torch
import torch.nn.functional as F

torch.manual_seed(0)
kind, gain, size = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
zeros = torch.zeros(16, dtype=torch.long).cuda()


def contrasted(out):
    similar = torch.matmul(out, out.T)
    mask = torch.eye(out.shape[0], dtype=torch.bool, device=out.device)
    similar = similar[~mask].view(out.shape[0], -1)
    logits = similar * gain
    return F.cross_entropy(logits, zeros) / 1e3


def summed(out):
    return (out * gain).square().sum(dtype=out.dtype) / 1e4


def cast_itself(out):
    return (out * gain).square().sum(dtype=out.dtype).float() / 1e4


def behind(out):
    if True: return F.cross_entropy(out * (gain * 10), zeros)


def plain(out):
    logits = out * (gain * 10)
    return F.cross_entropy(logits, zeros)


for step in range(5):
    x = torch.randn(16, 8).cuda() * size
    with torch.autocast("cuda", dtype=torch.float16):
        loss = globals()[kind](model(x))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

OFF = "with torch.autocast(device_type=out.device.type, enabled=False):"


def suggested(folder: Path, kind: str, gain: str, size: str = "80") -> tuple[Record, str, str]:
    """What is suggested for the first captured step: its record, the patch and the page."""
    record = run(folder, LOSSES, kind, gain, size)[1]
    assert (record.findings[0].code, record.script is not None) == ("forward-overflow", True)
    assert record.script is not None
    result = start(folder, "suggest-fp32", record.script.captures[0], "--record=s.json")
    return read_record(folder / "s.json"), result.stdout, " ".join(result.stderr.split())


def added(patch: str) -> list[str]:
    """The lines that a diff puts in."""
    return [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]


@pytest.mark.parametrize(
    ("kind", "gain", "lines"),
    [
        (
            "contrasted",
            "30",
            [
                OFF.replace("out.", "similar."),
                "logits = similar.float() * gain",
                "return F.cross_entropy(logits, zeros) / 1e3",
            ],
        ),
        ("summed", "2", [OFF, "return (out.float() * gain).square().sum() / 1e4"]),
        ("cast_itself", "2", [OFF, "return (out.float() * gain).square().sum().float() / 1e4"]),
    ],
)
def test_a_line_of_the_loss_is_edited_and_proven(tmp_path: Path, kind: str, gain: str, lines: list[str]) -> None:
    record, patch, _ = suggested(tmp_path, kind, gain)
    assert record.verification is not None
    assert (record.verification.passed, added(patch)) == (True, lines)


@pytest.mark.parametrize("kind", ["contrasted", "summed", "plain"])
def test_a_loss_within_range_is_healthy(tmp_path: Path, kind: str) -> None:
    assert run(tmp_path, LOSSES, kind, "0.01", "1")[1].findings == ()


def test_why_a_line_of_the_loss_is_not_edited_is_true(tmp_path: Path) -> None:
    _, patch, _ = suggested(tmp_path, "behind", "200")
    reason = "line 29 of train.py cannot be edited: it stands behind a colon; put it on a line of its own first"
    assert reason in " ".join(patch.replace("#", "").split())


def test_an_op_of_the_backward_pass_is_not_called_an_overflow_of_the_forward_pass(tmp_path: Path) -> None:
    _, _, page = suggested(tmp_path, "plain", "10000", "1")
    assert "2 sum · train.py:40 · 100,000 in FP32 · in the backward pass" in page
