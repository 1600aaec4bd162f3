"""From a broken run to a merged patch: scan, suggest-fp32, git apply, scan again; and training without ampdbg."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.proof.jobs import FreshProcesses
from ampdbg.proof.suggestion import suggest
from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from ampdbg.report.suggestion import content
from ampdbg.training.loop import train
from tests.commands.program import ROOT, Result, environment, start
from tests.proof.overflowing import run_in_this_process
from tests.zoo.test_zoo import CASES, FILES, config_of

SCREENS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "screens").glob("*.txt"))]

PATCHES = {
    "linear_attention": """\
+        with torch.autocast(device_type=k.device.type, enabled=False):
+            q, k, v = q.float(), k.float(), v.float()
+            k_sum = k.sum(dim=1)
+            kv = torch.einsum("nshd,nshm->nhdm", k, v)
+            normaliser = torch.einsum("nlhd,nhd->nlh", q, k_sum)
+            return torch.einsum("nlhd,nhdm->nlhm", q, kv) / normaliser.unsqueeze(-1)
""",
    "camera": """\
+        with torch.autocast(device_type=world.device.type, enabled=False):
+            camera = self.intrinsics @ self.extrinsics
+            homogeneous = torch.cat([world, torch.ones_like(world[:, :1])], dim=1)
+            pixels = homogeneous @ camera.T
""",
    "house_prices": """\
+        with torch.autocast(device_type=price.device.type, enabled=False):
+            return 10_000 * price.float()
""",
    "vit": """\
+        with torch.autocast(device_type=q.device.type, enabled=False):
+            logits = (q.float() * self.scale) @ k.float().transpose(-2, -1)
""",
}

LEFT = {"vit": {"precision-loss"}}
"""Codes that may remain. Half rounds queries whose products pass 65,504, so later gradients are far from FP32's."""

TRAINS = """
import importlib, math, torch, yaml
config = yaml.safe_load(open(f"{NAME}.yaml"))
def found(target):
    module, name = target.removesuffix(".py").replace(".py:", ":").split(":")
    return getattr(importlib.import_module(module), name)
model = found(config["model"]["target"])(**config["model"]["args"])
loss_of = found(config["loss"]["target"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step, batch in zip(range(3), found(config["data"]["target"])(**config["data"].get("args", {}))):
    given, target = batch if isinstance(batch, (tuple, list)) else (batch["input"], batch["target"])
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(given), target)
    optimizer.zero_grad()
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    optimizer.step()
print(f"trained to {float(loss):.3f}")
"""

T5 = '''\
"""Fine-tunes a small T5 with a gated feed-forward, in which outliers have grown."""
import torch
{before}from transformers import T5Config, T5ForConditionalGeneration


def build_model(outliers=300.0):
    torch.manual_seed(0)
    config = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
                      feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    feed_forward = model.encoder.block[1].layer[1].DenseReluDense
    with torch.no_grad():
        feed_forward.wi_0.weight[:4] *= outliers
        feed_forward.wi_1.weight[:4] *= outliers
    return model


def build_data():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 128, (4, 4, 24), generator=generator)
    return [{{"input_ids": batch, "labels": batch[:, :12].contiguous()}} for batch in ids]


if __name__ == "__main__":
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in build_data():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    print(f"trained to {{float(loss):.3f}}")
'''


def git(folder: Path, *arguments: str, given: str = "") -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        cwd=folder,
        input=given.encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def repository(folder: Path, name: str) -> Path:
    """A repository with one of the examples in it, committed."""
    for suffix in (".py", ".yaml"):
        shutil.copy(ROOT / "configs" / f"{name}{suffix}", folder)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "as it was")
    return folder


def without_ampdbg(folder: Path, code: str) -> str:
    """Runs code in a Python that cannot import ampdbg."""
    blocked = f"import sys; sys.modules['ampdbg'] = None; sys.path.insert(0, '.')\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", blocked],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def suggested(folder: Path, config: str, *options: str) -> tuple[Result, Record]:
    result = start(folder, "suggest-fp32", config, "--record", "record.json", *options, OMP_NUM_THREADS="1")
    return result, read_record(folder / "record.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_the_patch_of_an_example_fixes_its_run_and_trains_without_ampdbg(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    folder = repository(tmp_path, name)
    result, record = suggested(folder, f"{name}.yaml")
    assert result.code == 0, result.stderr
    added = [line for line in result.stdout.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == PATCHES[name].splitlines()
    command = f"$ ampdbg suggest-fp32 configs/{name}.yaml\n"
    shown = [line for line in result.stdout.splitlines() if line.startswith(("# Keeps", "+  ", "-  "))]
    assert all(line in screen for screen in SCREENS if screen.startswith(command) for line in shown)
    assert record.verification is not None
    assert record.verification.passed
    assert all(f"#   - {step.name}: {step.detail}" in result.stdout for step in record.verification.steps)
    git(folder, "apply", "-", given=result.stdout)
    again = start(folder, "scan", f"{name}.yaml", "--quiet", "--record", "again.json", OMP_NUM_THREADS="1")
    left = {finding.code for finding in read_record(folder / "again.json").faults}
    assert left <= LEFT.get(name, set()), again.stdout
    assert without_ampdbg(folder, f"NAME = {name!r}\n{TRAINS}").startswith("trained to ")
    git(folder, "apply", "-R", "-", given=result.stdout)
    assert git(folder, "status", "--porcelain", "--untracked-files=no") == ""


def test_an_example_is_fixed_by_a_patch_proven_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreshProcesses, "__call__", run_in_this_process)
    folder = repository(tmp_path, "house_prices")
    config = folder / "house_prices.yaml"
    found = suggest(load_config(config))
    assert found.record.verification is not None
    assert found.record.verification.passed
    patch = (content(found.record) or b"").decode()
    added = [line for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == PATCHES["house_prices"].splitlines()
    git(folder, "apply", "-", given=patch)
    assert diagnose(train(load_config(config))).verdict == "healthy"
    git(folder, "apply", "-R", "-", given=patch)
    assert git(folder, "status", "--porcelain", "--untracked-files=no") == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_attention", "camera"])
def test_the_patch_of_an_example_is_proven_over_200_steps(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    _, record = suggested(repository(tmp_path, name), f"{name}.yaml", "--steps", "200")
    assert record.verification is not None
    assert record.verification.passed
    assert any(step.name == "training 200 steps" for step in record.verification.steps)


@pytest.mark.slow
def test_a_library_module_is_pinned_by_name_in_the_users_script(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    # The CPU build of torch does not fit the torchvision of the package index, which a text model does not need.
    before = "import sys; sys.modules.setdefault('torchvision', None)\n"
    (tmp_path / "train.py").write_text(T5.format(before=before))
    (tmp_path / "run.yaml").write_text(
        "model: {target: train.py:build_model}\ndata: {target: train.py:build_data}\ntrain: {steps: 3}\n"
    )
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "as it was")
    result, record = suggested(tmp_path, "run.yaml")
    assert result.code == 0, result.stderr
    assert [pin.name for pin in record.pins] == ["encoder.block.1.layer.1.DenseReluDense.wo"]
    assert "     model = T5ForConditionalGeneration(config)\n+    _keep_in_fp32(model)\n" in result.stdout
    git(tmp_path, "apply", "-", given=result.stdout)
    assert start(tmp_path, "scan", "run.yaml", "--quiet", OMP_NUM_THREADS="1").code == 0
    ran = without_ampdbg(tmp_path, "import runpy; runpy.run_path('train.py', run_name='__main__')")
    assert ran.startswith("trained to ")


UNCURED = ("true_nan_forward", "batch_with_nan", "divergence", "batch_out_of_range")


@pytest.mark.slow
@pytest.mark.parametrize("name", UNCURED)
def test_a_case_that_no_pin_fixes_gets_a_remedy_and_no_patch(name: str, tmp_path: Path) -> None:
    file = next(file for file in FILES if file.stem == name)
    result, record = suggested(tmp_path, str(config_of(file, tmp_path)))
    assert (result.code, result.stdout) == (1, "")
    assert record.findings[0].code == CASES[name].code
    assert record.findings[0].remedy in " ".join(result.stderr.split())
    assert record.pins == ()
