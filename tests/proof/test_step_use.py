"""What a step takes: the bytes that autograd keeps are counted by memory, in half and in FP32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ampdbg.proof.experiments import step_use
from ampdbg.proof.jobs import StepUse
from ampdbg.replay.run import prepared
from tests.proof.overflowing import NET, failing_steps, written

LINEAR = (
    NET.replace("nn.Linear(8, 8), nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)")
    .replace("        x = F.layer_norm(large / GAIN**2, (8,))\n", "")
    .replace("        large = (GAIN * x) @ (GAIN * torch.eye(8, device=x.device))\n", "        x = x * float('inf')\n")
)


def used(folder: Path, dtype: str) -> StepUse | None:
    config = written(folder, {"net.py": LINEAR})
    (step,) = failing_steps(config)
    with prepared(config) as run:
        return step_use(run, step, dtype)


@pytest.mark.parametrize(
    ("dtype", "item"),
    [
        # Both inputs and a copy of the second weight, which is what the gradient of its input needs.
        ("float16", 2 * 2 * 16 * 8 + 2 * 8 * 8),
        ("float32", 4 * 2 * 16 * 8),
    ],
    ids=["half", "FP32"],
)
def test_bytes_kept_for_the_backward_pass(dtype: str, item: int, tmp_path: Path) -> None:
    use = used(tmp_path, dtype)
    assert use is not None
    # The loss keeps its two operands in FP32.
    assert use.saved_bytes == item + 2 * 4 * 16 * 8
    assert use.seconds > 0
    assert use.is_emulated is not torch.cuda.is_available()
    assert use.peak_bytes is None or torch.cuda.is_available()


def test_a_step_that_raises_is_not_measured(tmp_path: Path) -> None:
    config = written(tmp_path)
    (step,) = failing_steps(config)
    (tmp_path / "net.py").write_text(NET.replace("return self.after(x)", "raise RuntimeError"))
    with prepared(config) as run:
        assert step_use(run, step, "float16") is None
