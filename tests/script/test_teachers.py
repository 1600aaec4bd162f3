"""A frozen teacher beside the model, and a loss with a running mean: what they hold and give is as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import run
from tests.siblings import slow_but_for

DISTILLED = scripts.loop("""
fault, ends = sys.argv[1], sys.argv[2] == "ends"

class Attention(torch.nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.query, self.key, self.gain = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), gain
    def forward(self, x):
        q, k = self.query(x) * self.gain, self.key(x) * self.gain
        return (q @ k.transpose(-2, -1)) / self.gain**2  # HERE

class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 8))
    def forward(self, student, teacher):
        target = F.softmax((teacher.float() - self.center) / 0.4, dim=-1).detach()
        loss = -(target * F.log_softmax(student.float() / 0.9, dim=-1)).sum(-1).mean()
        self.center = self.center * 0.5 + teacher.float().mean((0, 1)) * 0.5
        return loss

high = 600.0 if fault != "none" else 1.0
student = Attention(1.0 if fault == "teacher" else high).cuda()
teacher, criterion = Attention(high).cuda(), Centred().cuda()
teacher.load_state_dict(student.state_dict())
for weight in teacher.parameters():
    weight.requires_grad = False
optimizer, scaler = torch.optim.SGD(student.parameters(), lr=1e-2), torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(6):
    x = torch.randn(4, 8, 16).cuda() * 3
    with torch.autocast("cuda", dtype=torch.float16):
        target = teacher(x)
        loss = criterion(student(x), target)
    if ends and not math.isfinite(loss.item()):
        sys.exit(1)
    STEP
""")
LINE = next(number for number, line in enumerate(DISTILLED.splitlines(), start=1) if line.endswith("# HERE"))


def trained(folder: Path, *arguments: str) -> tuple[Record, str]:
    """The record of the script, and what stands on its page."""
    result, record = run(folder, DISTILLED, *arguments)
    return record, " ".join(result.stderr.split())


@pytest.mark.parametrize("how", slow_but_for(["ends"], ["ends", "goes on"]))
def test_an_overflow_that_a_teacher_has_too_is_named(tmp_path: Path, how: str) -> None:
    record, page = trained(tmp_path, "both", how)
    found = record.findings[0]
    assert (record.verdict, found.code, found.op) == ("precision", "forward-overflow", "aten.bmm.default")
    assert (found.step, found.source and found.source.line) == (0, LINE)
    assert "run again with finite numbers in the place of argument 2 of Centred on line 38 of train.py" in page


@pytest.mark.slow
def test_an_overflow_of_a_teacher_alone_is_not_the_mathematics(tmp_path: Path) -> None:
    record, page = trained(tmp_path, "teacher", "ends")
    assert (record.verdict, record.findings) == ("inconclusive", ())
    assert "it is given inf or NaN, which it may have computed itself: no replay can tell" in page


@pytest.mark.slow
def test_an_overflow_of_a_teacher_alone_is_named_where_the_script_goes_on(tmp_path: Path) -> None:
    record, _ = trained(tmp_path, "teacher", "goes on")
    found = record.findings[0]
    assert (record.verdict, found.code, found.op) == ("precision", "forward-overflow", "aten.bmm.default")
    assert (found.step, found.source and found.source.line) == (0, LINE)


@pytest.mark.slow
def test_a_patch_is_said_not_to_be_tried_on_what_was_not_run_again(tmp_path: Path) -> None:
    trained(tmp_path, "both", "ends")
    (capture,) = (tmp_path / ".ampdbg" / "captures").glob("*.safetensors")
    result = start(tmp_path, "suggest-fp32", str(capture))
    page = " ".join(result.stderr.split())
    warned = "argument 2 of Centred on line 38 of train.py was not finite, and is here: pin what computes it, too"
    assert "the patch for it is proven on the failing step" in page
    assert f"! what step 0 is given: {warned}" in page
    assert f"#   - what step 0 is given: {warned}" in result.stdout


@pytest.mark.slow
def test_a_running_mean_of_the_loss_is_as_it_was_before_the_step(tmp_path: Path) -> None:
    options = ("--emulate", "--capture-step=3")
    _, record = run(tmp_path, DISTILLED, "none", "goes on", options=options)
    assert (record.verdict, record.findings) == ("healthy", ())
    (capture,) = (tmp_path / ".ampdbg" / "captures").glob("*.safetensors")
    assert start(tmp_path, "replay", "--record=again.json", str(capture)).code == 0
    again = read_record(tmp_path / "again.json")
    loss = next(step.loss for step in record.steps if step.step == 3)
    assert again.investigations[0].replays[0].loss == loss
