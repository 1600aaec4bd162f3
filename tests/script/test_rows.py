"""Rows of skipped steps: each fault is named at its own step, also with new scalers or loops in threads."""

from collections import Counter
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import captured, run
from tests.siblings import slow_except

SETTLES = scripts.loop("""
net = nn.Linear(16, 4).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**26)
for step in range(12):
    with torch.autocast("cuda", torch.float16):
        out = net(torch.randn(32, 16).cuda()).float()
        loss = out.pow(2).mean()
        if step == int(sys.argv[1]):
            loss = loss + (out - out.detach()).pow(2).sum().sqrt()
    STEP
""")
"""The loss scale settles in eight steps."""


@pytest.mark.slow
@pytest.mark.parametrize(("at", "found"), [("3", [("true-nan", 3)]), ("99", [("scale-calibration", 0)])])
def test_a_fault_while_the_loss_scale_settles_is_named_at_its_own_step(
    tmp_path: Path, at: str, found: list[tuple[str, int]]
) -> None:
    _, record = run(tmp_path, SETTLES, at, options=("--emulate", "--capture-step=3"))
    assert record.steps_skipped == 8
    assert [(one.code, one.step) for one in record.findings] == found


TWO = scripts.loop("""
bad = sys.argv[1]

class Length(nn.Module):
    def forward(self, h):
        return h.float().pow(2).sum(-1).sqrt().mean()

class Small(nn.Module):
    def forward(self, h):
        h = h.half()
        return (h * h).sum(-1).sqrt().mean()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.length, self.small = nn.Linear(8, 8), Length(), Small()

    def forward(self, x, gain, offset):
        h = self.body(x)
        return h.float().pow(2).mean() + self.length(h * gain) + self.small(h * 0 + offset)

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(8):
    gain = 0.0 if step == 2 and "a" in bad else 1.0
    offset = 1e-8 if step == 3 and "b" in bad else 1.0
    with torch.autocast("cuda", torch.float16):
        loss = net(torch.randn(4, 8).cuda(), gain, offset)
    STEP
""")
"""Step 2 has no finite gradients in any precision; in step 3 only FP16 has none."""

LENGTH, SMALL = ("true-nan", 2, "length", None), ("eps-underflow", 3, "small", None)


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "found"), [("a", [LENGTH]), ("ab", [LENGTH, SMALL]), ("", [])])
def test_a_second_fault_in_the_next_step_is_found_beside_the_first(
    tmp_path: Path, bad: str, found: list[tuple[str, int, str, None]]
) -> None:
    _, record = run(tmp_path, TWO, bad)
    assert [(one.code, one.step, one.module, one.root) for one in record.findings] == found


OF_TWO_LOSSES = scripts.loop("""
one, other = nn.Linear(8, 4).cuda(), nn.Linear(8, 4).cuda()
optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (one, other)]
scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in optimizers]
for turn in range(6):
    for place in (0, 1):
        optimizers[place].zero_grad()
        with torch.autocast("cuda", torch.float16):
            out = (other if place else one)(torch.randn(16, 8).cuda()).float()
            loss = out.pow(2).mean() * (1 + 2 * place)
            if turn == 3 and place == 1:
                loss = loss + (out - out.detach()).pow(2).sum().sqrt()
        scalers[place].scale(loss).backward()
        scalers[place].step(optimizers[place])
        scalers[place].update()
""")
"""The second loss is three times the first and has its own scaler; in step 7 its gradients are not finite."""


@pytest.mark.slow
def test_losses_of_optimizers_with_their_own_scalers_are_separate_curves(tmp_path: Path) -> None:
    _, record = run(tmp_path, OF_TWO_LOSSES, options=("--emulate", "--capture-step=7"))
    assert [(one.code, one.step) for one in record.findings] == [("true-nan", 7)]
    replayed = start(tmp_path, "replay", captured(record)[0])
    assert replayed.code == 1
    again = read_record(tmp_path / ".ampdbg" / "latest.json")
    assert [(one.code, one.step) for one in again.findings] == [("true-nan", 7)]
    assert [step.scaler for step in again.steps] == [2] * 4  # those of its own optimizer


ANEW = scripts.loop("""
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-7)
for step in range(40):
    if step % int(sys.argv[1]) == 0:
        scaler = torch.amp.GradScaler("cuda", init_scale=float(sys.argv[2]))
    x = torch.randn(32, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (net(x) * 2 - 1).float().pow(2).mean()
    STEP
""")


CASES = {
    "none lasts": ("1", "65536", [("scale-restart", "error")]),  # no step is taken, without an error
    "each lasts a little": ("4", "65536", [("scale-restart", "warning")]),
    "nothing is lost": ("1", "64", []),
    "one scaler, as it ought to be": ("40", "65536", [("scale-calibration", "info")]),
}


@pytest.mark.parametrize("case", slow_except(["none lasts", "nothing is lost"], CASES))
def test_a_new_scaler_every_few_steps_is_reported_if_steps_are_skipped(tmp_path: Path, case: str) -> None:
    every, begins, found = CASES[case]
    result, record = run(tmp_path, ANEW, every, begins)
    assert [(one.code, one.severity) for one in record.findings] == found
    assert result.code == any(severity != "info" for _, severity in found)


LOOPS = scripts.loop("""
from concurrent.futures import ThreadPoolExecutor

STEPS, LOOPS = 4, 3
together = threading.Barrier(LOOPS, timeout=60)

def train(net):
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(STEPS):
        with torch.autocast("cuda"):
            loss = net(torch.ones(16, 8).cuda()).square().mean() * GAIN
        optimizer.zero_grad()
        together.wait()
        scaler.scale(loss).backward()
        together.wait()
        scaler.step(optimizer)
        together.wait()
        scaler.update()
        together.wait()

nets = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).cuda() for _ in range(LOOPS)]
with ThreadPoolExecutor(LOOPS) as pool:
    print([*pool.map(train, nets)])
""")


@pytest.mark.parametrize("gain", slow_except(["1e9"], ["1.0", "1e9"]))
def test_each_step_of_loops_in_several_threads_is_counted_once(gain: str, tmp_path: Path) -> None:
    result, record = run(tmp_path, LOOPS.replace("GAIN", gain))
    assert result.stdout == "[None, None, None]\n"
    assert Counter(step.step for step in record.steps) == Counter(range(12))
    assert sum(step.skipped for step in record.steps) == (0 if gain == "1.0" else 12)
    assert (len(record.steps), record.steps_run, record.error, record.investigations) == (12, 4, "", ())  # 4 each
