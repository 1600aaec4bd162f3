"""One step of a loop that looks healthy is held against FP32: what it hides is found, and the run stays the same."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import run, saves_the_same_alone, steps_captured

HIDDEN = """
import sys, torch
from torch import nn
torch.manual_seed(0)

class Norm(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

net = nn.Sequential(nn.Linear(32, 16), Norm(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)).cuda()
optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(80):
    x, y = float(sys.argv[1]) * torch.rand(8, 32).cuda(), torch.randint(0, 4, (8,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y) * (1e8 if step == 10 and sys.argv[2:] else 1.0)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save([net.state_dict(), optimizer.state_dict(), scaler.state_dict(), net[1].calls, torch.rand(3)], "net.pt")
"""
"""At 1,000 the squares overflow, and rsqrt makes a zero of each inf: no loss and no gradient shows it."""


@pytest.mark.parametrize(
    ("factor", "found"), [("1000", ["silent-overflow"]), pytest.param("1", [], marks=pytest.mark.slow)]
)
def test_the_first_step_behind_ten_that_were_taken_is_compared_and_captured_where_it_hides_an_overflow(
    tmp_path: Path, factor: str, found: list[str]
) -> None:
    result, record = run(tmp_path, HIDDEN, factor)
    (made,) = record.investigations
    assert made.why == "end"
    assert made.step >= 10  # on a slow machine it is a later one, within the share of the run's time
    assert [(one.code, one.step, one.module, one.op) for one in record.findings[:1]] == [
        (code, made.step, "1", "aten.mul.Tensor") for code in found
    ]
    assert (result.code, steps_captured(record)) == (len(found), [made.step] * len(found))
    assert ("suggest-fp32" in result.stderr) == bool(found)
    saves_the_same_alone(tmp_path, factor)


def test_no_step_is_compared_where_none_is_to_be_replayed(tmp_path: Path) -> None:
    result, record = run(tmp_path, HIDDEN, "1000", options=("--emulate", "--no-investigate"))
    assert (result.code, record.investigations) == (0, ())
    said = "step 10, which looks healthy, was not compared with FP32: --no-investigate allows no replay"
    assert record.unseen.notes == (said,)
    assert "no step compared with FP32 ·" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("steps", "is_compared"), [("10", False), ("11", True)])
def test_a_run_too_short_for_a_comparison_says_how_many_steps_that_takes(
    tmp_path: Path, steps: str, is_compared: bool
) -> None:
    result, record = run(tmp_path, HIDDEN.replace("range(80)", f"range({steps})"), "1")
    page = " ".join(result.stderr.split())
    assert ("no step compared with FP32: that takes over 10 steps in a row without a skip" in page) != is_compared
    assert [made.step for made in record.investigations] == [10] * is_compared


@pytest.mark.slow
def test_a_step_whose_replays_take_too_long_is_not_compared_and_the_run_says_so(tmp_path: Path) -> None:
    slow = HIDDEN.replace("    optimizer.zero_grad()", "    time.sleep(1.6)\n    optimizer.zero_grad()", 1)
    text = slow.replace("import sys, torch", "import sys, time, torch").replace("range(80)", "range(12)")
    _, record = run(tmp_path, text, "1")
    assert record.investigations == ()
    (said,) = record.unseen.notes
    assert said == (
        "step 10, which looks healthy, was not compared with FP32: its replays take more of the run's time than ampdbg "
        "uses"
    )


def test_a_step_whose_gradients_overflow_as_it_is_compared_is_a_failing_one_and_no_other_loss(tmp_path: Path) -> None:
    _, record = run(tmp_path, HIDDEN, "1", "withheld")
    assert [step.step for step in record.steps if step.skipped] == [10]
    assert not [note for note in record.unseen.notes if "compared with FP32" in note]
    (compared,) = [made.step for made in record.investigations if made.why == "end"]
    assert compared > 20  # ten steps are to be taken in a row again
    saves_the_same_alone(tmp_path, "1", "withheld")


STATIC = """
import torch
from torch import nn
torch.manual_seed(0)
net, batch = nn.Linear(8, 1).cuda(), torch.empty(16, 8).cuda()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(20):
    batch.copy_(torch.rand(16, 8))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (net(batch).float() - batch.cpu().cuda().sum(1, keepdim=True)).square().mean()
    batch.zero_()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save([net.state_dict(), optimizer.state_dict(), scaler.state_dict(), torch.rand(3)], "net.pt")
"""
"""One tensor takes every batch, and is cleared before the backward pass."""


def test_a_step_whose_batch_was_overwritten_since_is_compared_with_the_batch_as_it_was(tmp_path: Path) -> None:
    _, record = run(tmp_path, STATIC)
    assert [(made.step, made.reproduced) for made in record.investigations] == [(10, True)]
    assert not record.unseen.notes
    saves_the_same_alone(tmp_path)


FP16_WEIGHTS = scripts.loop("""
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).cuda().half()
optimizer = torch.optim.SGD(net.parameters(), lr=6e4)
for step in range(14):
    x = torch.randn(32, 16).cuda().half()
    loss = (net(x) - x[:, :1]).float().square().mean() * 1e-7
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")


def test_a_scaler_is_no_remedy_for_fp16_weights_alone(tmp_path: Path) -> None:
    _, record = run(tmp_path, FP16_WEIGHTS)
    (found,) = (one for one in record.findings if one.code == "gradient-underflow")
    assert found.remedy.startswith("keep the weights in float32 and run the model under autocast with a GradScaler")
