"""``ampdbg suggest-fp32`` on a script with half weights: the edit, and a short run before and after it."""

import subprocess
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import Result, start, start_python

NET = """
import os, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 4)).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
for step in range(30):
    x = torch.randn(16, 32)
    y = model(x.to(next(model.parameters()).dtype))
    loss = (y.float() - x[:, :4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    LAST
"""
LOSING = NET.replace("LR", "1e-5").replace("LAST", "open('log.txt', 'a').write('.')")

LLAMA = """
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32,
)
"""
TOKENS = "torch.randint(0, 64, (80, 8), generator=torch.Generator().manual_seed(0)).sort().values"

TRAINER = f"""
import torch, tests.models.torchvision_on_cpu
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("tiny")
data = [{{"input_ids": one, "labels": one}} for one in {TOKENS}]
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, max_steps=20, learning_rate=1e-5, report_to=[],
    save_steps=8, use_cpu=True, disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=data).train()
"""
ACCELERATE = f"""
import torch, tests.models.torchvision_on_cpu
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    {LLAMA.strip()}
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = torch.utils.data.DataLoader({TOKENS}, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

main()
"""


def suggested(folder: Path, text: str, *options: str) -> tuple[Result, Record, Result]:
    """The result of a run of a script with this text, and the record and the result of the suggestion for it."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    ran = start(folder, "run", "--record=r.json", "train.py")
    found = start(folder, "suggest-fp32", "r.json", "--record=s.json", *options)
    assert (folder / "s.json").exists(), found.stderr
    return ran, read_record(folder / "s.json"), found


def details(record: Record) -> dict[str, str]:
    """The detail of each step of the proof."""
    assert record.verification is not None
    return {step.name: step.detail for step in record.verification.steps}


def units(record: Record) -> list[str]:
    """The titles of the patch's edits."""
    assert record.handover is not None
    return [unit.title for unit in record.handover.units]


def test_the_edit_for_lost_updates_is_proven_by_a_run_before_and_after_the_patch(tmp_path: Path) -> None:
    ran, record, found = suggested(tmp_path, LOSING)
    log = (tmp_path / "log.txt").read_text()
    assert log == "." * 30, "a run of the proof has written into a file that was there"
    assert "ampdbg suggest-fp32 r.json" in ran.stderr
    assert record.verification is not None
    assert record.verification.passed
    lost = details(record)["frozen-weights"]
    assert "97% (linears)" in lost.partition(" before; ")[0]
    assert lost.endswith("none lost, as the weights are float32 themselves with the patch")
    assert units(record) == [
        "line 6 of train.py: weights in float32",
        "line 10 of train.py: forward pass and loss under autocast, on cpu in bfloat16",
    ]
    # 32 * 64 + 64 + 128 + 64 * 4 + 4 elements: weight, gradient and two states, two bytes more for each.
    assert record.handover is not None
    assert record.handover.notes[0] == "weights in float32 under autocast: 20 kB more"
    assert any("AdamW4bit" in note and note.endswith("7.5 kB less") for note in record.handover.notes)
    refused = start(tmp_path, "suggest-fp32", "r.json", "--format=yaml")
    assert refused.code == 2
    assert "no pin cures half weights; allowed: --format diff, --format json" in " ".join(refused.stderr.split())
    applied = subprocess.run(["patch", "-p1"], cwd=tmp_path, input=found.stdout.encode(), check=False)
    assert applied.returncode == 0
    again = start(tmp_path, "run", "--record=again.json", "train.py")
    assert (again.code, read_record(tmp_path / "again.json").findings) == (0, ())


CAST = ".to(torch.bfloat16)\n"
THROUGH_DATA = "\nfor p in model.parameters(): p.data = p.data.to(dtype=torch.bfloat16)\n"
IN_THE_DICT = """
for module in model:
    for name, p in module.named_parameters():
        module._parameters[name] = nn.Parameter(p.detach().bfloat16())
"""


@pytest.mark.slow
def test_a_cast_of_the_data_of_every_parameter_is_edited_and_proven(tmp_path: Path) -> None:
    _, record, found = suggested(tmp_path, LOSING.replace(CAST, THROUGH_DATA))
    assert record.verification is not None
    assert record.verification.passed
    assert units(record)[0] == "line 7 of train.py: weights in float32"
    assert "+for p in model.parameters(): p.data = p.data.to(dtype=torch.float32)\n" in found.stdout


@pytest.mark.slow
def test_suggest_fp32_exits_with_2_if_no_line_with_the_half_cast_was_seen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSING.replace(CAST, IN_THE_DICT), encoding="utf-8")
    assert start(tmp_path, "run", "--record=r.json", "train.py").code == 1
    found = start(tmp_path, "suggest-fp32", "r.json")
    why = "no edit is known for its bfloat16 weights: ampdbg saw no line of it that makes them so"
    assert (found.code, " ".join(found.stderr.split()).rpartition("error: ")[2]) == (2, f"train.py: {why}")


GIVEN = """
import sys
from accelerate import Accelerator

def main(kind, mixed_precision="no"):
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 4)).to(kind)

model = main(getattr(torch, sys.argv[1]))
"""
CREATED = "model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 4)).to(torch.bfloat16)\n"


@pytest.mark.slow
def test_suggest_fp32_says_what_to_give_to_a_script_that_takes_its_dtypes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSING.replace(CREATED, GIVEN), encoding="utf-8")
    assert start(tmp_path, "run", "--record=r.json", "train.py", "bfloat16").code == 1
    found = start(tmp_path, "suggest-fp32", "r.json")
    assert (found.code, found.stdout) == (2, "")
    told = " ".join(found.stderr.split()).rpartition("error: ")[2]
    assert told == (
        "train.py: no edit is printed: by hand: line 11 of train.py: the script is given mixed_precision; give it "
        '"bf16" instead and by hand: line 12 of train.py: the script is given kind; give it torch.float32 instead'
    )


@pytest.mark.slow
def test_half_weights_that_lose_nothing_get_no_patch(tmp_path: Path) -> None:
    ran, record, found = suggested(tmp_path, NET.replace("LR", "0.05").replace("LAST", ""))
    assert (ran.code, found.code, record.handover, found.stdout) == (0, 0, None, "")
    assert "The bfloat16 weights do no harm here" in " ".join(found.stderr.split())


OWN = """
class Own(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        torch.manual_seed(0)  # so the step runs no second time
        for p in self.param_groups[0]["params"]: p.add_(p.grad, alpha=-0.1)

"""


@pytest.mark.slow
def test_half_weights_are_not_called_harmless_if_their_updates_cannot_be_compared(tmp_path: Path) -> None:
    text = NET.replace("torch.optim.AdamW", "Own").replace("LR", "0.05").replace("LAST", "")
    ran, record, found = suggested(tmp_path, text.replace("\nmodel", f"\n{OWN}model", 1))
    assert (ran.code, found.code, record.handover) == (0, 0, None)
    printed = " ".join(found.stderr.split())
    assert (
        "what bfloat16 weights lose is not known: ampdbg cannot compare the updates of 6 of 6 half parameters"
        in printed
    )


@pytest.mark.slow
def test_a_finding_that_the_short_run_does_not_show_is_reported_as_not_run(tmp_path: Path) -> None:
    # Angles of positions beyond 1,000, which bfloat16 holds to within 4, as in a bfloat16 rotary embedding.
    angles = "y = y * torch.sin(torch.arange(1000, 1016, dtype=torch.bfloat16) / 7)[:, None]\n    loss = "
    _, record, found = suggested(tmp_path, LOSING.replace("loss = ", angles))
    assert [one.code for one in record.faults] == ["precision-loss", "frozen-weights"]
    assert record.verification is not None
    assert [(step.name, step.ran) for step in record.verification.steps][1:] == [
        ("frozen-weights", True),
        ("precision-loss", False),
        ("lost of the loss's fall, to first order", True),
    ]
    assert "not run: precision-loss" in " ".join(found.stderr.split())


@pytest.mark.slow
def test_a_script_that_cannot_run_again_gets_an_unproven_patch_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").touch()
    removes = NET.replace("LR", "1e-5").replace("LAST", "os.rename('kept.txt', 'moved.txt') if step == 8 else None")
    (tmp_path / "moved.txt").touch()
    (tmp_path / "train.py").write_text(removes)
    start(tmp_path, "run", "--record=r.json", "train.py")
    (tmp_path / "kept.txt").mkdir()  # now it is a folder, which no replay moves over a file
    found = start(tmp_path, "suggest-fp32", "r.json", "--record=s.json")
    record = read_record(tmp_path / "s.json")
    assert found.code == 0
    assert units(record)
    assert "# Not proven: train.py calls os.rename on " in found.stdout
    assert "Proven by" not in found.stdout
    assert "the patch is not proven" in " ".join(found.stderr.split())


@pytest.mark.slow
def test_only_the_norms_become_float32_if_no_other_parameter_is_frozen(tmp_path: Path) -> None:
    _, record, _ = suggested(tmp_path, LOSING.replace("1e-5", "1e-3"))
    assert units(record)[0] == "line 6 of train.py: norms in float32"
    assert record.handover is not None
    assert record.handover.notes[0] == "norms in float32: 1.0 kB more"
    assert details(record)["frozen-weights"].partition(" before; ")[2].startswith("0 parameters frozen")


@pytest.mark.slow
def test_a_stuck_second_moment_gets_a_lower_beta2(tmp_path: Path) -> None:
    sticking = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(64, 32, bias=False).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)  # with another, updates are lost too
for step in range(2500):
    sign = torch.randn(64, 32).sign() * (1.0 if step < 50 else 0.01)
    loss = (model(torch.eye(64).bfloat16()) * sign).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    _, record, _ = suggested(tmp_path, sticking)
    assert units(record) == ["line 7 of train.py: betas=(0.9, 0.95)"]
    assert details(record)["stuck-moment"].endswith("second moments 1 times apart with the patch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "asked"),
    [(TRAINER, "line 7 of train.py: bf16=True"), (ACCELERATE, 'line 8 of train.py: mixed_precision="bf16"')],
    ids=["trainer", "accelerate"],
)
def test_a_small_llama_in_a_trainer_or_accelerate_script_is_fixed(tmp_path: Path, text: str, asked: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    imports = "import torch, tests.models.torchvision_on_cpu\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    checkpoint = imports + LLAMA
    start_python(tmp_path, f"{checkpoint}LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained('tiny')")
    ran, record, _ = suggested(tmp_path, text)
    assert ran.code == 1
    assert asked in units(record)
    assert record.verification is not None
    assert record.verification.passed
    assert (
        "none lost" in details(record)["frozen-weights"] or "0 parameters frozen" in details(record)["frozen-weights"]
    )


@pytest.mark.slow
def test_a_capture_of_half_weights_gets_the_edit_and_bisect_refuses_the_capture(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSING)
    ran = start(tmp_path, "run", "--record=r.json", "--capture-step=5", "train.py")
    record = read_record(tmp_path / "r.json")
    assert record.script is not None
    (capture,) = record.script.captures
    searched = start(tmp_path, "bisect", capture)
    assert searched.code == 2
    assert "its weights are stored in bfloat16, and no pin changes that; type: ampdbg suggest-fp32" in searched.stderr
    found = start(tmp_path, "suggest-fp32", capture, "--record=s.json")
    assert found.code == 0, found.stderr
    assert units(read_record(tmp_path / "s.json"))[0] == "line 6 of train.py: weights in float32"
    assert ran.code == 1
