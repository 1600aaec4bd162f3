"""Scripts that replace inf and NaN in their gradients by numbers before the optimizer steps, as StyleGAN and EDM do."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import first_finding, run_with_page

IDIOM = scripts.loop("""
gain, repair, every = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=4.0, enabled=repair == "scaled")
for step in range(24):
    x = torch.randn(64, 32, device="cuda")
    factor = gain if step % every == every - 1 else 1.0
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        y = net(x) + net(x)
    loss = (y.float() * factor - x[:, :8] * factor).square().sum()
    scaler.scale(loss).backward()
    for parameter in net.parameters():
        if repair == "drop" and not parameter.grad.isfinite().all():
            parameter.grad = None
        elif repair != "drop":
            torch.nan_to_num(parameter.grad, nan=0, posinf=0, neginf=0, out=parameter.grad)
    scaler.step(optimizer)
    scaler.update()
""")
"""A gain of 300 gives gradients beyond FP16's limit. ``every`` says how seldom."""


@pytest.mark.parametrize("repair", ["plain", "scaled", "drop"])
def test_gradients_that_the_script_repairs_are_found_with_their_op_and_line(tmp_path: Path, repair: str) -> None:
    record, page, code = run_with_page(tmp_path, IDIOM, "300", repair, "1")
    found, _, _, line = first_finding(record)
    assert (code, record.verdict, found) == (1, "precision", "gradient-overflow")
    assert line == "loss = (y.float() * factor - x[:, :8] * factor).square().sum()"
    repaired = [step.step for step in record.steps if step.repaired]
    assert repaired == [*range(1, 24)]  # the first step shows that the script writes gradients
    assert "the script replaced inf or NaN in the gradients of 23 of 24 steps" in page
    assert "none of 24 steps skipped, and 23 repaired by the script" in page
    assert not any(step.skipped for step in record.steps)


@pytest.mark.parametrize("repair", ["plain", "scaled"])
def test_finite_gradients_that_the_script_writes_are_healthy(tmp_path: Path, repair: str) -> None:
    record, page, code = run_with_page(tmp_path, IDIOM, "1", repair, "1")
    assert (code, record.verdict, record.findings) == (0, "healthy", ())
    assert not any(step.repaired for step in record.steps)
    assert "replaced inf or NaN" not in page
    assert "step 10 agrees with FP32" in page


def test_gradients_that_are_seldom_repaired_are_a_note(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, IDIOM, "300", "plain", "12")
    assert (code, record.verdict, record.findings) == (0, "healthy", ())
    assert "the script replaced inf or NaN in the gradients of 2 of 24 steps" in page


def test_repaired_gradients_are_no_healthy_run_without_a_replay(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, IDIOM, "300", "plain", "1", options=("--emulate", "--no-investigate"))
    assert (code, record.verdict, *first_finding(record)[:2]) == (1, "inconclusive", "unknown", 1)
    assert "replaced gradients that were not finite in 23 steps of 24, first in step 1; no replay shows" in page
