"""Loops that clip their gradients: the FP32 continuation clips too, and scaled gradients are not clipped."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import first_finding, run_with_page
from tests.siblings import slow_except

CLIPPED = scripts.loop("""
clips = sys.argv[1] == "clips"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(16, 64), nn.Linear(64, 10), 1.0

    def forward(self, x):
        h = (torch.relu(self.a(x)) * self.gain) / self.gain
        return self.b(h)

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
for step in range(8):
    net.gain = 3e5 if step == 6 else 1.0
    x, y = torch.randn(16, 16).cuda(), torch.randint(10, (16,)).cuda()
    with torch.autocast("cuda"):
        loss = 400.0 * F.cross_entropy(net(x), y, reduction="sum")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if clips:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""")
"""Without clipping, a gradient of norm 6,000 makes the weights diverge."""


@pytest.mark.parametrize("how", slow_except(["clips"], ["clips", "does not"]))
def test_an_overflow_is_a_precision_fault_only_if_the_loop_clips_its_gradients(tmp_path: Path, how: str) -> None:
    record, _, _ = run_with_page(tmp_path, CLIPPED, how)
    if how == "clips":
        line = "h = (torch.relu(self.a(x)) * self.gain) / self.gain"
        assert (record.verdict, first_finding(record)) == ("precision", ("forward-overflow", 6, "", line))
    else:
        assert record.verdict != "precision"


BY_HAND = scripts.loop("""
way = sys.argv[1]
net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=way != "bfloat16")
for step in range(14):
    x, y = torch.randn(16, 16).cuda(), torch.randint(10, (16,)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16 if way == "bfloat16" else torch.float16):
        loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if way == "unscaled":
        scaler.unscale_(optimizer)
    for one in net.parameters():
        norm = one.grad.data.norm(2)
        if way == "divided":
            one.grad.data.div_(20.0)
        elif norm > 0.01:
            one.grad.data.mul_(0.01 / (norm + 1e-6))
    scaler.step(optimizer)
    scaler.update()
""")


def test_a_limit_of_the_scripts_own_on_scaled_gradients_is_a_misuse(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, BY_HAND, "scaled")
    assert (code, first_finding(record)[:2]) == (1, ("misuse-clip-scaled", 10))
    assert "their norm is 0.02 in each step" in page  # 0.01 of each of four parameters


@pytest.mark.parametrize("way", ["unscaled", "divided", "bfloat16"])
def test_a_limit_on_unscaled_gradients_and_a_division_are_no_misuse(way: str, tmp_path: Path) -> None:
    record, _, code = run_with_page(tmp_path, BY_HAND, way)
    assert (code, record.verdict, record.findings) == (0, "healthy", ())
