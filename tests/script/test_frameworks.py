"""``ampdbg run`` on scripts whose framework decides about half precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import frameworks
from tests.script.test_run import alone, run

SCRIPTS = {
    "accelerate": frameworks.ACCELERATE,
    "transformers": frameworks.TRAINER,
    "lightning": frameworks.LIGHTNING,
    "lightning.fabric": frameworks.FABRIC,
}

OVERFLOW = """
import torch.nn.functional
from torch import nn

class Mix(nn.Module):
    def forward(self, x):
        similar = (x * 3e3) @ (x * 3e3).transpose(-1, -2)
        return x + similar.mean(-1, keepdim=True) / 1e7
"""
PLANTED = {
    "accelerate": ("nn.ReLU()", "Mix()", "1"),
    "lightning": ("nn.ReLU()", "Mix()", "net.1"),
    "lightning.fabric": ("nn.ReLU()", "Mix()", "1"),
    "transformers": ("args = Tr", "model.transformer.h[1].mlp.act = Mix()\nargs = Tr", "transformer.h.1.mlp.act"),
}
"""What stands in each script, the fault in its place, and the fault's module."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_framework_trains_in_fp16_where_a_gpu_is_emulated(tmp_path: Path, name: str) -> None:
    text = f"import tests.models.torchvision_on_cpu\n{SCRIPTS[name]}"
    result, record = run(tmp_path, text)
    assert (result.code, record.verdict, record.environment.policy) == (0, "healthy", "cuda")
    assert {step.scale for step in record.steps} == {65536.0}
    again, _ = run(tmp_path, text)
    assert again.stdout.splitlines()[-1] == result.stdout.splitlines()[-1]
    watched, _ = run(tmp_path, text, options=())
    assert watched.stdout.splitlines()[-1] == alone(tmp_path, "train.py").splitlines()[-1]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_the_step_run_again(tmp_path: Path, name: str) -> None:
    healthy, faulty, module = PLANTED[name]
    script = SCRIPTS[name].replace("max_norm=1.0)", "max_norm=1.0, error_if_nonfinite=False)")  # else Fabric ends it
    text = f"import tests.models.torchvision_on_cpu\n{OVERFLOW}{script.replace(healthy, faulty)}"
    result, record = run(tmp_path, text, options=("--emulate", "--fail-on=never"))
    bare = start(tmp_path, "run", "--emulate", "--no-watch", "train.py")
    assert (result.code, result.stdout.splitlines()[-1]) == (0, bare.stdout.splitlines()[-1])
    found = record.findings[0]
    assert found.source is not None
    assert (record.verdict, found.code, found.module) == ("precision", "forward-overflow", module)
    assert found.source.text.startswith("similar = ")
    assert [replay.dtype for replay in record.investigations[0].replays[:2]] == ["float16", "float32"]
    capture = min((tmp_path / ".ampdbg" / "captures").iterdir())
    again = start(tmp_path, "replay", str(capture), "--record=c.json")
    replayed = read_record(tmp_path / "c.json")
    assert (again.code, replayed.findings[0].code, replayed.findings[0].module) == (1, "forward-overflow", module)
    assert (replayed.investigations[0].reproduced, replayed.findings[0].source) == (5, found.source)
