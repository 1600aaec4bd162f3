"""Lines of a script's own loss that overflow, outside of any module: edited, and the edit is proven in the script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import captured, run
from tests.siblings import slow_but_for

LOSSES = scripts.loop("""
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


def targeted(out):
    return (out * 4096 * target.to(out.dtype)).mean() / 1e6


def targeted_twice(out):
    return ((out - target.to(out.dtype)) * (out - target.type_as(out))).mean() / 1e6


for step in range(5):
    x = torch.randn(16, 8).cuda() * size
    target = torch.linspace(-2.0, 2.0, 128).view(16, 8).cuda() * gain * (step + 1)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = globals()[kind](model(x))
    STEP
""")

OFF = "with torch.autocast(device_type=out.device.type, enabled=False):"


def suggested(folder: Path, kind: str, gain: str, size: str = "80") -> tuple[Record, str, str]:
    """What is suggested for the first captured step: its record, the patch and the page."""
    record = run(folder, LOSSES, kind, gain, size)[1]
    assert record.findings[0].code == "forward-overflow"
    result = start(folder, "suggest-fp32", captured(record)[0], "--record=s.json")
    return read_record(folder / "s.json"), result.stdout, " ".join(result.stderr.split())


def added(patch: str) -> list[str]:
    """The lines that a diff puts in."""
    return [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "returned"),
    [
        ("targeted", "(out.float() * 4096 * target.float()).mean() / 1e6"),
        (
            "targeted_twice",
            "((out.float() - target.float()) * (out.float() - target.type_as(out.float()))).mean() / 1e6",
        ),
    ],
)
def test_a_target_that_is_cast_no_more_is_the_captured_one(tmp_path: Path, kind: str, returned: str) -> None:
    record, patch, _ = suggested(tmp_path, kind, "900", "1")
    assert record.verification is not None
    assert (record.verification.passed, added(patch)) == (True, [OFF, f"return {returned}"])
    told = {step.name: step.detail for step in record.verification.steps}
    losses = re.fullmatch(r"healthy; loss (.+), (.+) in FP32", told["the failing step (1)"])
    assert losses is not None
    in_fp32 = next(made.replays[1] for made in read_record(tmp_path / "r.json").investigations if made.step == 1)
    assert in_fp32.dtype == "float32"
    assert [float(one) for one in losses.groups()] == pytest.approx([in_fp32.loss] * 2, rel=1e-3)


@pytest.mark.parametrize("kind", slow_but_for(["plain"], ["contrasted", "summed", "plain"]))
def test_a_loss_within_range_is_healthy(tmp_path: Path, kind: str) -> None:
    assert run(tmp_path, LOSSES, kind, "0.01", "1")[1].findings == ()


@pytest.mark.slow
def test_why_a_line_of_the_loss_is_not_edited_is_true(tmp_path: Path) -> None:
    _, patch, _ = suggested(tmp_path, "behind", "200")
    reason = "line 31 of train.py cannot be edited: it stands behind a colon; put it on a line of its own first"
    assert reason in " ".join(patch.replace("#", "").split())


@pytest.mark.slow
def test_an_op_of_the_backward_pass_is_not_called_an_overflow_of_the_forward_pass(tmp_path: Path) -> None:
    _, _, page = suggested(tmp_path, "plain", "10000", "1")
    assert "2 sum · train.py:51 · 100,000 in FP32 · in the backward pass" in page
