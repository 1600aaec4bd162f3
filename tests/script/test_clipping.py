"""Loops that clip their gradients: the FP32 continuation clips too."""

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
