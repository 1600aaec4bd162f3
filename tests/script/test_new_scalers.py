"""A loop that makes a new GradScaler again and again, and so begins at a large loss scale each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import run
from tests.siblings import slow_but_for

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
    "none lasts": ("1", "65536", [("scale-restart", "error")]),  # no step is taken, and no error says so
    "each lasts a little": ("4", "65536", [("scale-restart", "warning")]),
    "nothing is lost": ("1", "64", []),
    "one scaler, as it ought to be": ("40", "65536", [("scale-calibration", "info")]),
}


@pytest.mark.parametrize("case", slow_but_for(["none lasts", "nothing is lost"], CASES))
def test_a_new_scaler_every_few_steps_is_told_of_where_it_costs_steps(tmp_path: Path, case: str) -> None:
    every, begins, found = CASES[case]
    result, record = run(tmp_path, ANEW, every, begins)
    assert [(one.code, one.severity) for one in record.findings] == found
    assert result.code == any(severity != "info" for _, severity in found)
