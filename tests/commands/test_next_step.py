"""A run that this machine cannot complete ends with the next command to type."""

from pathlib import Path

import pytest
import torch

from tests.commands.program import start

NEEDS_A_GPU = """
import sys
import torch

model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.ones(3, 4).cuda()).sum()
    loss.backward()
    optimizer.step()
print(sys.argv[1:])
"""

ACCELERATED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="{precision}", cpu=True)
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(model(torch.ones(3, 4)).square().mean())
    optimizer.step()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs where there is a GPU")
def test_a_script_that_needs_a_gpu_ends_with_the_emulate_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NEEDS_A_GPU, encoding="utf-8")
    ended = start(tmp_path, "run", "train.py", "--emulate", "--epochs", "3")
    said = ended.stderr.splitlines()
    assert ended.code == 1
    assert "This machine has no GPU." in said
    assert said[-2:] == [
        "  ampdbg run --emulate train.py --epochs 3",
        (
            "--emulate follows the script, so the script got it. "
            "To give it to ampdbg: ampdbg run --emulate train.py --epochs 3"
        ),
    ]
    # The suggested command works: the script runs and gets its own option.
    again = start(tmp_path, "run", "--emulate", "--fail-on=never", "train.py", "--epochs", "3")
    assert (again.code, again.stdout) == (0, "['--epochs', '3']\n")


def test_options_after_the_script_are_passed_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n", encoding="utf-8")
    ended = start(tmp_path, "run", "train.py", "--quiet", "--record=x.json")
    assert (ended.code, ended.stdout) == (0, "['--quiet', '--record=x.json']\n")
    assert "so the script got it" not in ended.stderr


@pytest.mark.parametrize(("precision", "is_said"), [("fp16", True), ("bf16", False)])
def test_accelerate_that_drops_fp16_on_a_cpu_is_reported_with_the_emulate_command(
    tmp_path: Path, precision: str, is_said: bool
) -> None:
    (tmp_path / "train.py").write_text(ACCELERATED.format(precision=precision), encoding="utf-8")
    said = " ".join(start(tmp_path, "run", "train.py").stderr.split())
    assert (
        "no op ran in FP16 or bfloat16, although Accelerate's mixed_precision 'fp16' asks for it" in said
    ) is is_said
    assert ("ampdbg run --emulate train.py" in said) is is_said


def test_a_missing_data_package_ends_with_its_pip_install_command(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {target: m.py:Net}\ndata: {target: m.py:batches}\n", encoding="utf-8")
    # Raises the error of an import of the missing package.
    missing = "raise ModuleNotFoundError(\"No module named 'sklearn'\", name='sklearn')\nNet = batches = None\n"
    (tmp_path / "m.py").write_text(missing, encoding="utf-8")
    ended = start(tmp_path, "scan", "run.yaml")
    assert ended.code == 2
    said = "The package scikit-learn is not installed beside ampdbg. Next: pip install scikit-learn"
    assert ended.stderr.rstrip().endswith(said)
