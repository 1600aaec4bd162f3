"""``ampdbg run`` on scripts whose framework decides about half precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script import frameworks
from tests.script.test_run import alone, run

SCRIPTS = {
    "accelerate": frameworks.ACCELERATE,
    "transformers": frameworks.TRAINER,
    "lightning": frameworks.LIGHTNING,
    "lightning.fabric": frameworks.FABRIC,
}

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
