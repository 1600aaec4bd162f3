"""``ampdbg ranges`` end to end: from a config to a table, a record and an exit code."""

import json
from pathlib import Path

import pytest

import ampdbg
from ampdbg.record.file import read_record
from tests.commands.program import Here
from tests.replay.test_shadow import FIVE, KEYS, OVERFLOWING_LINE
from tests.written import written

HEALTHY = FIVE.replace("h * 300.0", "h * 1.0")


def test_ranges_exits_with_1_for_five_overflows_and_report_lists_the_same_rows(here: Here) -> None:
    written(here.folder, FIVE, **KEYS)
    result = here("ranges", "config.yaml", "--quiet", "-v", "--record", "r.json")
    assert result.code == 1
    assert result.stdout.startswith("! 5 places would overflow in FP16; an FP16 run would show the first and hide")
    listed = [line for line in result.stdout.splitlines() if line.lstrip().startswith("✗") and "fwd" in line]
    assert len(listed) == 5
    assert all(f"work.py:{OVERFLOWING_LINE}" in line for line in listed)
    assert "h = h * h  # overflows" in result.stdout
    again = here("report", "r.json", "-v").stdout
    rows = [line for line in again.splitlines() if "│" in line]
    assert rows == [line for line in result.stdout.splitlines() if "│" in line] != []


def test_a_model_within_range_exits_with_0_and_lists_its_loss_scales(here: Here) -> None:
    written(here.folder, HEALTHY, **KEYS)
    result = here("ranges", "config.yaml", "--quiet")
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("✓ Everything fits FP16 at step 0: ")
    assert "the whole model" in result.stdout
    assert result.stdout.splitlines()[-1] == "  ampdbg ranges config.yaml --steps 51"


def test_the_next_command_carries_the_options_that_change_the_run(here: Here) -> None:
    written(here.folder, FIVE, **KEYS)
    given = "config.yaml --set train.clip_grad_norm=2 --steps 3 --seed 5"
    result = here("ranges", *given.split(), "--quiet")
    assert result.stdout.splitlines()[-1] == f"  ampdbg scan {given}"


def test_json_output_equals_the_record_file(here: Here) -> None:
    written(here.folder, FIVE, **KEYS)
    result = here("ranges", "config.yaml", "--quiet", "--json", "--steps", "2", "--record", "r.json")
    data = json.loads(result.stdout)
    assert data == json.loads((here.folder / "r.json").read_text(encoding="utf-8"))
    assert (data["command"], data["planned_steps"], len(data["steps"])) == ("ranges", 2, 1)
    assert read_record(here.folder / "r.json").sites[0].source is not None


def test_order_and_top_choose_the_listed_rows(here: Here) -> None:
    written(here.folder, FIVE, **KEYS)
    text = here("ranges", "config.yaml", "--quiet", "--order", "execution", "--top", "2", "-v").stdout
    assert "Tightest against FP16's limit, in order of execution" in text
    assert len([line for line in text.splitlines() if line.count("│") == 2]) == 2


def test_a_step_that_raises_leaves_a_record_of_the_earlier_steps(here: Here) -> None:
    code = HEALTHY.replace(
        "def step(model, batch):", "CALLS = []\n\ndef step(model, batch):\n    CALLS.append(1 / (3 - len(CALLS)))"
    )
    written(here.folder, code, **KEYS)
    result = here.refused("ranges", "config.yaml", "--quiet", "--steps", "9", "--record", "r.json")
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert result.stderr.splitlines()[-1] == "the 3 steps before it: ampdbg report r.json"
    record = read_record(here.folder / "r.json")
    assert (record.command, record.verdict, len(record.steps), record.planned_steps) == ("ranges", "inconclusive", 3, 9)
    shown = here("report", "r.json").stdout
    assert shown.startswith("! An error stopped the run after 3 of 9 steps, before the ranges were measured.")
    assert "ZeroDivisionError" in shown
    assert "Everything fits" not in shown


def test_ranges_from_python_plans_one_step_and_finds_five_overflows(tmp_path: Path) -> None:
    written(tmp_path, FIVE, **KEYS)
    record = ampdbg.ranges(tmp_path / "config.yaml", overrides=("train.steps=50",))
    assert (record.verdict, record.planned_steps) == ("inconclusive", 1)
    assert [finding.code for finding in record.findings if finding.phase == "forward"] == ["forward-overflow"] * 5


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_ranges_names_five_overflows_of_a_half_model_and_none_of_its_healthy_twin(level: str, here: Here) -> None:
    written(here.folder, FIVE, **KEYS)
    result = here("ranges", "config.yaml", "--quiet", "--set", f"precision.level={level}")
    assert (result.code, result.stdout.partition(" ")[2][:31]) == (1, "5 places would overflow in FP16")
    listed = [line for line in result.stdout.splitlines() if line.lstrip().startswith("✗") and "fwd" in line]
    assert len(listed) == 5
    assert all(f"work.py:{OVERFLOWING_LINE}" in line for line in listed)
    written(here.folder, HEALTHY, **KEYS)
    healthy = here("ranges", "config.yaml", "--quiet", "--set", f"precision.level={level}")
    assert healthy.code == 0
    assert healthy.stdout.startswith("✓ Everything fits FP16 at step 0: ")


def test_a_bfloat16_config_is_reported_ready_for_fp16_with_or_without_pins(here: Here) -> None:
    written(here.folder, HEALTHY, **KEYS, precision={"dtype": "bfloat16"})
    healthy = here("ranges", "config.yaml", "--quiet")
    assert healthy.code == 0
    said = " ".join(healthy.stdout.split())
    assert said.startswith("✓ Judging by step 0, this would train in FP16 with nothing pinned: its largest magnitude, ")
    assert " measured in bfloat16, then run in FP16 at a loss scale of " in said
    assert healthy.stdout.endswith("  ampdbg scan config.yaml --set precision.dtype=float16\n")

    written(here.folder, FIVE, **KEYS, precision={"dtype": "bfloat16"})
    result = here("ranges", "config.yaml", "--quiet", "--record", "r.json")
    record = read_record(here.folder / "r.json")
    assert result.code == 1
    assert record.readiness is not None
    assert (record.readiness.trains, record.readiness.pins) == (True, ("0:own", "2:own", "4:own", "6:own", "8:own"))
    assert [check.pins for check in record.checks] == [(), (), record.readiness.pins]
    said = "Judging by step 0, this would train in FP16 with module 0 (its own lines), module 2 (its own lines),"
    for form in ("text", "markdown", "html"):
        assert said in " ".join(here("report", "r.json", "--format", form).stdout.split()), form
    assert " ".join(result.stdout.split()).startswith(f"! {said}")
    assert result.stdout.endswith("  ampdbg suggest-fp32 config.yaml --set precision.dtype=float16\n")


@pytest.mark.parametrize("code", [FIVE, HEALTHY])
def test_an_fp16_scan_confirms_the_readiness_and_its_pins(code: str, tmp_path: Path) -> None:
    written(tmp_path, code, **KEYS, precision={"dtype": "bfloat16"})
    ready = ampdbg.ranges(tmp_path / "config.yaml").readiness
    assert ready is not None
    in_fp16 = ("precision.dtype=float16", "train.steps=6", f"precision.loss_scale={ready.ceiling / 2}")
    plain = ampdbg.scan(tmp_path / "config.yaml", overrides=in_fp16)
    assert plain.verdict == ("precision" if ready.pins else "healthy")
    pinned = (*in_fp16, f"precision.pins={list(ready.pins)}")
    assert ampdbg.scan(tmp_path / "config.yaml", overrides=pinned).verdict == "healthy"


BROKEN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        h = self.inner(x)
        h = LINE
        return self.outer(h.float())

def build_model():
    return Model()

def build_data():
    return [torch.randn(32, 8, generator=torch.Generator().manual_seed(0))]

def step(model, batch):
    return model(batch).float().square().mean()
"""
IN_FP32 = "✗ Step 0 is not finite in FP32 either: "
LINES = {
    "a loss that is NaN": ("h * 0 / (h * 0).sum()", "other", f"{IN_FP32}the loss is NaN."),
    "a derivative of NaN": (
        "h + (h.float() * 0).norm(dim=-1, keepdim=True).sqrt()",
        "other",
        f"{IN_FP32}the gradients hold 288 NaN, in 2 parameters.",
    ),
    "a constant that multiplies": (
        "(g := h * (1 + (1 - torch.tensor(0.0)) * 3e5)) - g.amax(-1, keepdim=True)",
        "inconclusive",
        "but in FP16 the loss is NaN, and no loss scale helps.",
    ),
    "a transform that overflows": (
        "torch.fft.fft2(h * 8000).real.float() / 8000",
        "inconclusive",
        "? Everything that was measured fits FP16 at step 0: the forward pass has",
    ),
}


@pytest.mark.parametrize(("line", "verdict", "said"), LINES.values(), ids=LINES)
def test_a_step_that_is_not_finite_is_not_reported_to_fit_fp16(here: Here, line: str, verdict: str, said: str) -> None:
    written(here.folder, BROKEN.replace("LINE", line), **KEYS)
    result = here("ranges", "config.yaml", "--quiet", "--record", "r.json")
    record = read_record(here.folder / "r.json")
    assert (result.code, record.verdict, record.findings[0].code) == (1, verdict, "unknown")
    assert said in " ".join(result.stdout.split())
    assert "Loss scales" not in result.stdout
    assert result.stdout.endswith("Next: see where it starts\n  ampdbg scan config.yaml\n")


def test_an_unmeasured_fourier_transform_is_judged_by_an_fp16_replay(here: Here) -> None:
    written(here.folder, BROKEN.replace("LINE", "torch.fft.fft2(h).real"), **KEYS)
    result = here("ranges", "config.yaml", "--quiet", "--record", "r.json")
    record = read_record(here.folder / "r.json")
    assert (result.code, record.verdict, record.findings) == (0, "inconclusive", ())
    half = record.checks[1]
    assert (half.dtype, half.error, half.gradients) == ("float16", "", ())
    said = " ".join(result.stdout.split())
    assert said.startswith("? Everything that was measured fits FP16 at step 0: ")
    assert "Not measured: Fourier transforms; a replay with them is finite in FP16 at a loss scale of" in said
    assert "Loss scales that work, as far as measured" in said
    assert result.stdout.endswith("  ampdbg scan config.yaml\n")


def test_a_mask_constant_beyond_fp16_is_mentioned_and_exits_with_0(here: Here) -> None:
    written(here.folder, BROKEN.replace("LINE", "(h + ((1 - torch.eye(32)) * -1e9).to(h.dtype)).softmax(-1)"), **KEYS)
    result = here("ranges", "config.yaml", "--quiet")
    assert result.code == 0
    assert result.stdout.startswith("✓ No op overflows by itself, but an input or a constant of the code exceeds FP16")
    assert "fits" not in result.stdout.partition("Tightest")[0]
