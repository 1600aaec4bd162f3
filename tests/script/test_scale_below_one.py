"""Gradients that overflow at a loss scale of 1, behind a block whose large activations run in FP32 as pinned."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import run, steps_captured

PINNED = scripts.loop("""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return self.down(self.up(x.float()).relu() * float(sys.argv[1]))

net = nn.Sequential(nn.Linear(16, 32), Block(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=int(sys.argv[2]))
for step in range(16):
    x, y = torch.randn(8, 16).cuda(), torch.randn(8, 4).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
    STEP
""")
"""The scale falls from 4 to 0.25 in fewer skips than five, and works there."""


def test_a_step_that_fails_at_a_scale_of_1_is_replayed_and_captured_in_a_short_row_of_skips(tmp_path: Path) -> None:
    result, record = run(tmp_path, PINNED, "5000", "2000")
    assert [step.scale for step in record.steps if step.skipped] == [4.0, 2.0, 1.0, 0.5]
    assert [(one.code, one.module, one.root) for one in record.findings] == [
        ("gradient-overflow", "2", None),
        ("scale-runaway", "", 0),
    ]
    assert (result.code, record.verdict, steps_captured(record)) == (1, "precision", [2])
    assert "Next: make the patch that cures it, proven on the captured step" in result.stderr


def test_without_replays_the_scale_below_1_is_the_cause_and_not_an_unknown_one(tmp_path: Path) -> None:
    _, record = run(tmp_path, PINNED, "5000", "2000", options=("--emulate", "--no-investigate"))
    assert [(one.code, one.root) for one in record.findings] == [("scale-runaway", None)]
    assert (record.verdict, steps_captured(record)) == ("other", [2])


@pytest.mark.slow
def test_a_scale_that_returns_to_1_after_every_second_step_leads_to_the_overflow_too(tmp_path: Path) -> None:
    _, record = run(tmp_path, PINNED, "10000", "2")
    assert [one.code for one in record.findings[:1]] == ["gradient-overflow"]
    assert steps_captured(record)


def test_a_scale_that_works_at_1_is_calibration_and_no_step_is_captured(tmp_path: Path) -> None:
    result, record = run(tmp_path, PINNED, "3000", "2000")
    assert [(one.code, one.severity) for one in record.findings] == [("scale-calibration", "info")]
    assert (result.code, record.verdict, steps_captured(record)) == (0, "healthy", [])
    assert {made.why for made in record.investigations} <= {"end"}
