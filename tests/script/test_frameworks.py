"""``ampdbg run``, ``ampdbg.watch`` with captures and the callbacks, in framework scripts and in a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg import watch
from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import Result, start
from tests.script import scripts
from tests.script.test_run import alone, first_finding, run

HEAD = """
import tests.models.torchvision_on_cpu
import torch
from torch import nn

class Mix(nn.Module):
    def forward(self, x):
        similar = (x * 3e3) @ (x * 3e3).transpose(-1, -2)
        return x + similar.mean(-1, keepdim=True) / 1e7

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
samples = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
data = torch.utils.data.DataLoader(samples, batch_size=8)
"""
END = 'print("weights", sum(float(p.detach().double().sum()) for p in net.parameters()))\n'

SCRIPTS = {
    "accelerate": """
from accelerate import Accelerator
a = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.StepLR(opt, 5)
net, opt, data, sched = a.prepare(net, opt, data, sched)
for epoch in range(2):
    for x, y in data:
        with a.accumulate(net):
            with a.autocast():
                loss = nn.functional.cross_entropy(net(x), y)
            a.backward(loss)
            if a.sync_gradients:
                a.clip_grad_norm_(net.parameters(), 1.0)
            opt.step(); sched.step(); opt.zero_grad()
""",
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
net = GPT2LMHeadModel(config)
args = TrainingArguments(
    "out", fp16=True, gradient_accumulation_steps=2, per_device_train_batch_size=4, max_steps=8,
    lr_scheduler_type="cosine", warmup_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
)
data = [{"input_ids": x, "labels": x} for x in torch.randint(0, 50, (64, 16))]
Trainer(model=net, args=args, train_dataset=data).train()
""",
    "lightning": """
import lightning as L
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = net
    def training_step(self, batch, i):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)
    def configure_optimizers(self):
        o = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [o], [torch.optim.lr_scheduler.StepLR(o, 5)]
t = L.Trainer(
    max_epochs=2, precision="16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    gradient_clip_val=1.0, accumulate_grad_batches=2,
)
t.fit(M(), data)
""",
    "lightning.fabric": """
from lightning.fabric import Fabric
f = Fabric(precision="16-mixed", devices=1)
f.launch()
net, opt = f.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
for x, y in f.setup_dataloaders(data):
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad(); f.backward(loss); f.clip_gradients(net, opt, max_norm=1.0); opt.step()
""",
}

PLANTED = {
    "accelerate": ("nn.ReLU()", "Mix()", "1"),
    "lightning": ("nn.ReLU()", "Mix()", "net.1"),
    "lightning.fabric": ("nn.ReLU()", "Mix()", "1"),
    "transformers": ("args = Tr", "net.transformer.h[1].mlp.act = Mix()\nargs = Tr", "transformer.h.1.mlp.act"),
}
"""The text to replace in each script, the fault, and the fault's module."""

CALLBACKS = {
    "lightning": ("t = L.Trainer(", "t = L.Trainer(callbacks=[__import__('ampdbg').lightning_callback()], "),
    "transformers": ("dataset=data", "dataset=data, callbacks=[__import__('ampdbg').transformers_callback()]"),
}


def text_of(name: str, is_faulty: bool = False) -> str:
    """Returns the script of a framework, healthy or with its fault."""
    healthy, faulty, _ = PLANTED[name]
    text = HEAD + SCRIPTS[name] + END
    return text.replace(healthy, faulty) if is_faulty else text


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_framework_trains_in_fp16_on_an_emulated_gpu(tmp_path: Path, name: str) -> None:
    text = text_of(name)
    result, record = run(tmp_path, text)
    assert (result.code, record.verdict, record.environment.policy) == (0, "healthy", "cuda")
    assert {step.scale for step in record.steps} == {65536.0}
    again, _ = run(tmp_path, text)
    assert again.stdout.splitlines()[-1] == result.stdout.splitlines()[-1]
    watched, _ = run(tmp_path, text, options=())
    assert watched.stdout.splitlines()[-1] == alone(tmp_path, "train.py").splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_in_a_framework_script_is_named_and_replayed(tmp_path: Path, name: str) -> None:
    text = text_of(name, is_faulty=True).replace("max_norm=1.0)", "max_norm=1.0, error_if_nonfinite=False)")
    result, record = run(tmp_path, text, options=("--emulate", "--fail-on=never"))  # else Fabric raises
    bare = start(tmp_path, "run", "--emulate", "--no-watch", "train.py")
    assert (result.code, result.stdout.splitlines()[-1]) == (0, bare.stdout.splitlines()[-1])
    found, module = record.findings[0], PLANTED[name][2]
    assert found.source is not None
    assert (record.verdict, found.code, found.module) == ("precision", "forward-overflow", module)
    assert found.source.text.startswith("similar = ")
    assert [replay.dtype for replay in record.investigations[0].replays][:2] == ["float16", "float32"]
    capture = min((tmp_path / ".ampdbg" / "captures").iterdir())
    again = start(tmp_path, "replay", str(capture), "--record=c.json")
    replayed = read_record(tmp_path / "c.json")
    assert (again.code, replayed.findings[0].code, replayed.findings[0].module) == (1, "forward-overflow", module)
    assert (replayed.investigations[0].reproduced, replayed.findings[0].source) == (5, found.source)


@pytest.mark.slow
def test_autocast_inside_the_model_is_known_from_earlier_steps(tmp_path: Path) -> None:
    """Accelerate enters autocast inside the model's call, unseen from outside; step 5 ends the script."""
    text = text_of("accelerate", is_faulty=True).replace("3e3", "gain").replace("steps=2", "steps=1")
    for old, new in {
        "for x, y in data:": "for step, (x, y) in enumerate(data):",
        "with a.autocast():": "for gain in [3e3 if step == 5 else 1.0]:",
        "a.backward(loss)": "loss.isfinite() or exit(1); a.backward(loss)",
    }.items():
        assert old in text
        text = text.replace(old, new)
    record = run(tmp_path, text)[1]
    assert first_finding(record) == ("forward-overflow", 5, "1", "similar = (x * gain) @ (x * gain).transpose(-1, -2)")
    assert record.investigations[0].low.dtype == "float16"


# Loops and framework callbacks that use ampdbg themselves


def emulated(folder: Path, text: str, *arguments: str) -> Result:
    """Runs the script on an emulated GPU without watching the script."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    return start(folder, "run", "--emulate", "--no-watch", "train.py", *arguments)


def with_watch(text: str) -> str:
    """Returns the script with its loop inside a watch that captures."""
    text = text.replace("import sys, torch", "import sys, torch, ampdbg")
    begins = "    watch = ampdbg.watch(net, optimizer, captures='kept').start()\n    for _ in range(steps):"
    text = text.replace("    for _ in range(steps):", begins)
    ends = "    watch.stop()\n    ampdbg.write_record(ampdbg.diagnose(watch.record()), 'r.json')\n    print("
    return text.replace("    print(", ends, 1)


def replayed(folder: Path, captures: Path) -> Record:
    """Replays the first capture and returns the record."""
    start(folder, "replay", str(min(captures.iterdir())), "--record=c.json")
    return read_record(folder / "c.json")


@pytest.mark.slow
@pytest.mark.parametrize("gain", ["1", "400"])
def test_a_loop_with_ampdbg_watch_captures_its_failing_steps(tmp_path: Path, gain: str) -> None:
    unwatched = emulated(tmp_path, scripts.PLAIN, gain, "6")
    result = emulated(tmp_path, with_watch(scripts.PLAIN), gain, "6")
    assert (result.code, result.stdout) == (0, unwatched.stdout)
    record = read_record(tmp_path / "r.json")
    if gain == "1":
        assert (record.verdict, record.findings, (tmp_path / "kept").exists()) == ("healthy", (), False)
        return
    found = record.findings[0]
    assert (record.verdict, found.code, found.module, found.step) == ("precision", "forward-overflow", "attention", 0)
    again = replayed(tmp_path, tmp_path / "kept").findings[0]
    assert (again.code, again.module, again.source) == (found.code, found.module, found.source)


def test_capture_returns_true_in_a_loop_with_ampdbg_watch(tmp_path: Path) -> None:
    text = with_watch(scripts.PLAIN).replace("optimizer.zero_grad()", "optimizer.zero_grad(); print(ampdbg.capture())")
    result = emulated(tmp_path, text, "1", "3")
    assert result.stdout.count("True") == 3
    assert (tmp_path / "kept").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_framework_callback_names_and_captures_a_fault(tmp_path: Path, name: str, is_faulty: bool) -> None:
    text, module = text_of(name, is_faulty), PLANTED[name][2]
    unwatched = emulated(tmp_path, text)
    result = emulated(tmp_path, text.replace(*CALLBACKS[name]))
    assert (result.code, result.stdout.splitlines()[-1]) == (0, unwatched.stdout.splitlines()[-1])
    record = read_record(tmp_path / ".ampdbg" / "latest.json")
    if not is_faulty:
        assert (record.verdict, record.findings) == ("healthy", ())
        return
    found = record.findings[0]
    assert (record.verdict, found.code, found.module) == ("precision", "forward-overflow", module)
    assert "forward-overflow" in result.stderr
    again = replayed(tmp_path, tmp_path / ".ampdbg" / "captures").findings[0]
    assert (again.code, again.module, again.source) == (found.code, found.module, found.source)


@pytest.mark.parametrize("captures", [3, True, b"folder", ["folder"]])
def test_watch_refuses_captures_that_are_not_a_path(captures: Any) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match="instead of the path of a folder; allowed: watch"):
        watch(model, torch.optim.SGD(model.parameters()), captures=captures)
