"""Inf and NaN that FP16 has made in one network, and that the script hands on to another: no bad data, and no fault of
the mathematics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_captures import capture_of, on
from tests.script.test_run import run
from tests.siblings import slow_but_for

CHAINED = scripts.loop("""
kind, gain = sys.argv[1], float(sys.argv[2])
first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.LayerNorm(4)).cuda()
second = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
with torch.no_grad():
    first[0].weight.mul_(gain)
trained = [*second.parameters()]
if kind != "frozen":
    trained += first.parameters()
optimizer, scaler = torch.optim.Adam(trained, 1e-3), torch.amp.GradScaler("cuda")
for step in range(6):
    x = torch.randn(16, 8, device="cuda")
    if kind == "data" and step == 2:
        x[3, 1] = float("nan")
    if kind == "adversaries":
        with torch.autocast("cuda"):
            loss = (second(torch.randn(16, 4, device="cuda")) - 1).float().square().mean()
        scaler.scale(loss).backward()
    with torch.autocast("cuda"):
        if kind == "frozen":
            with torch.no_grad():
                given = first(x)  # <- frozen
            loss = second(given).float().square().mean()
        else:
            given = first(x)
            loss = second(given.detach()).float().square().mean() + 1e-6 * given.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""")
"""With a gain of 3e5 the first network overflows in FP16; LayerNorm makes small numbers of it in FP32."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "module"), [("chained", "first.0"), ("adversaries", "first.0"), ("frozen", "")])
def test_what_one_network_has_spoilt_is_no_data_of_the_next(kind: str, module: str, tmp_path: Path) -> None:
    _, record = run(tmp_path, CHAINED, kind, "3e5")
    first = record.findings[0]
    assert (record.verdict, first.code, first.step, first.module) == ("precision", "forward-overflow", 0, module)
    assert {found.code for found in record.findings} <= {"forward-overflow", "scale-collapse"}
    if kind == "frozen":  # it is run again without the network that overflows
        noted = "step 0 was run again: it is given inf or NaN, which it may have computed itself: no replay can tell"
    else:
        given = "argument 1 of Sequential on line 31 of train.py, which it may have computed itself"
        noted = f"step 0 was run again with finite numbers in the place of {given}"
    assert noted in record.unseen.notes


@pytest.mark.parametrize("kind", slow_but_for(["chained"], ["chained", "adversaries", "frozen"]))
def test_the_same_networks_are_healthy_where_nothing_overflows(kind: str, tmp_path: Path) -> None:
    assert run(tmp_path, CHAINED, kind, "1")[1].verdict == "healthy"


@pytest.mark.slow
def test_bad_data_of_the_first_network_is_bad_data(tmp_path: Path) -> None:
    _, record = run(tmp_path, CHAINED, "data", "1")
    assert [(found.code, found.step) for found in record.findings] == [("data-nonfinite", 2)]


@pytest.mark.slow
def test_no_patch_is_promised_nor_denied_for_what_a_frozen_network_has_spoilt(tmp_path: Path) -> None:
    result, record = run(tmp_path, CHAINED, "frozen", "3e5")
    line = CHAINED.splitlines().index("                given = first(x)  # <- frozen") + 1
    assert record.findings[0].source
    assert record.findings[0].source.line == line
    assert "suggest-fp32" not in result.stderr
    capture = capture_of(tmp_path)
    replayed, again = on(tmp_path, "replay", capture)
    assert (again.verdict, again.findings[0].code) == ("inconclusive", "unknown")
    assert "may have computed that itself: no replay can tell" in " ".join(replayed.stdout.split())
    suggested, ended = on(tmp_path, "suggest-fp32", capture)
    assert ended.search is not None
    assert (ended.search.outcome, ended.pins) == ("spoilt-input", ())
    assert "in FP32 too" not in suggested.stdout
