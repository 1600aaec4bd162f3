"""A script that raises before its loss: the module outputs up to then are compared with FP32."""

from pathlib import Path

import pytest

from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import captured, run_with_page, steps_captured
from tests.siblings import slow_except

RAISES_BEFORE_LOSS = scripts.loop("""
import copy
kind, fault, when = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        z = self.head(self.inner(x).relu())
        return z.masked_fill(z < z.amax(-1, keepdim=True), -math.inf) if self.hides else z

    hides = False

net = Net().cuda()
teacher = copy.deepcopy(net) if kind == "teacher" else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for step in range(8):
    x = torch.randn(16, 8).cuda().clamp(-1, 1)
    seen = x * (1e5 if fault == "large" and step == when else 1.0)
    net.hides = teacher.hides = fault == "mask"
    with torch.set_grad_enabled(kind == "moved"), torch.autocast("cuda", dtype=torch.float16):
        if kind == "parts":
            target = net.head(net.inner(seen).relu())
        else:
            target = teacher(seen.to(x.device))
    if step == when:
        assert fault != "large" or torch.isfinite(target).all(), "the target is wrong"
        assert fault == "large", "out of data"
    net.hides = False
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (net(x).float() - target.detach().float().tanh()).pow(2).mean()
    STEP
""")
"""Computes a target, mostly without gradients; raises at step ``when``, due to the target or for another reason."""

KINDS = ["teacher", "own", "parts", "moved"]


@pytest.mark.parametrize("kind", slow_except(["teacher", "parts"], KINDS))
def test_an_input_beyond_fp16_is_found_if_the_script_raises_before_its_loss(tmp_path: Path, kind: str) -> None:
    record, page, code = run_with_page(tmp_path, RAISES_BEFORE_LOSS, kind, "large", "5")
    assert (code, record.verdict, record.steps_run, steps_captured(record)) == (1, "other", 6, [5])
    assert (record.findings[0].code, record.findings[0].step) == ("data-range", 5)
    assert "only its modules were replayed (the script ended before its loss)" in page
    assert "in FP32 too the loss" not in page  # no replay computed a loss


@pytest.mark.parametrize("step", slow_except(["0"], ["0", "5"]))
def test_replay_reproduces_data_range_for_a_step_that_ended_before_its_loss(tmp_path: Path, step: str) -> None:
    record, page, _ = run_with_page(tmp_path, RAISES_BEFORE_LOSS, "teacher", "large", step)
    again = start(tmp_path, "replay", captured(record)[0])
    said = " ".join(again.stdout.split())
    assert f"error data-range · step {step}" in said
    assert f"step {step} fails in 5 of 5 unchanged replays" in said
    assert ("no scaler used" in page, "no scaler used" in said) == (False, False)


@pytest.mark.parametrize("kind", slow_except(["own"], KINDS))
@pytest.mark.parametrize(
    ("fault", "why"),
    [("nothing", "every module output is finite"), ("mask", "its modules give inf or NaN in FP32 too")],
)
def test_an_error_after_finite_or_masked_outputs_has_no_finding_and_no_capture(
    tmp_path: Path, kind: str, fault: str, why: str
) -> None:
    record, page, code = run_with_page(tmp_path, RAISES_BEFORE_LOSS, kind, fault, "5")
    is_seen = why if kind != "parts" else "every module output is finite"  # with parts, no module output holds the mask
    assert (code, record.verdict, record.findings, steps_captured(record)) == (1, "inconclusive", (), [])
    assert is_seen in page
