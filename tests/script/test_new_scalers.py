"""A loop that makes a new GradScaler again and again, and so begins at a large loss scale each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script.test_run import run

ANEW = """
import sys, torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-7)
for step in range(40):
    if step % int(sys.argv[1]) == 0:
        scaler = torch.amp.GradScaler("cuda", init_scale=float(sys.argv[2]))
    x = torch.randn(32, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (net(x) * 2 - 1).float().pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("every", "begins", "code", "severity"),
    [
        ("1", "65536", "scale-restart", "error"),  # no step is taken, and no error says so
        ("4", "65536", "scale-restart", "warning"),
        ("1", "64", None, None),  # nothing is lost
        ("40", "65536", "scale-calibration", "info"),  # one scaler, as it ought to be
    ],
)
def test_a_new_scaler_every_few_steps_is_told_of_where_it_costs_steps(
    tmp_path: Path, every: str, begins: str, code: str | None, severity: str | None
) -> None:
    result, record = run(tmp_path, ANEW, every, begins)
    assert [(found.code, found.severity) for found in record.findings] == ([(code, severity)] if code else [])
    assert result.code == (0 if severity in (None, "info") else 1)
