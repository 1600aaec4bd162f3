"""What a script's own loss code casts to half beside its modules: FP16's fault, and no mathematics that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import captured, run, steps_captured, where
from tests.siblings import slow_but_for

SCRIPT = scripts.loop("""
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(4):
    x, y, far = torch.randn(32, 8).cuda(), torch.randint(0, 2, (32, 4)).cuda(), torch.full((32, 4), {far}).cuda()
    y[:, 0] = 1
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
        mask = (1.0 - y.float()) * -1e5
        loss = {loss}
    STEP
""")

BY_A_DISTANCE = "(torch.relu(out) * far.to(out.dtype)).float().neg().exp().mean()"
TWICE_MASKED = "torch.softmax(out + mask.to(out.dtype) - mask.to(out.dtype), -1).square().mean()"
MASKED = "torch.softmax(out + mask.to(out.dtype), -1).square().mean()"


CASES: dict[str, tuple[str, float, str, str | None]] = {
    "a distance": (BY_A_DISTANCE, 1e10, "precision", "forward-overflow"),
    "a near distance": (BY_A_DISTANCE, 1e2, "healthy", None),
    "a mask": (TWICE_MASKED, 1.0, "other", "mask-constant"),
    "a harmless mask": (MASKED, 1.0, "healthy", None),
}


@pytest.mark.parametrize("case", slow_but_for(["a distance", "a harmless mask"], CASES))
def test_a_cast_of_the_loss_code_is_judged_by_what_it_casts(tmp_path: Path, case: str) -> None:
    loss, far, verdict, code = CASES[case]
    result, record = run(tmp_path, SCRIPT.format(loss=loss, far=far))
    assert (result.code, record.verdict) == (int(verdict != "healthy"), verdict), result.stderr
    if code is None:
        assert record.findings == ()
        return
    assert (where(record)[::3], record.findings[0].op) == ((code, f"loss = {loss}"), "aten._to_copy.default")


DICE = scripts.loop("""
net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)

def dice(p, g):
    inside = torch.einsum("bchw,bchw->c", p / 2, g / 2)
    union = torch.einsum("bchw,bchw->c", p, p) + torch.einsum("bchw,bchw->c", g, g)
    return 1 - (8 * inside / (union + 1e-8)).mean()

for step in range(4):
    x = torch.randn(SAMPLES, 1, 128, 128, device="cuda")
    mask = (torch.rand(SAMPLES, 1, 128, 128, device="cuda") < 0.9).float()
    with torch.autocast("cuda"):
        loss = dice(net(x).sigmoid(), mask)
    STEP
""")


@pytest.mark.slow
@pytest.mark.parametrize("samples", [8, 2])
def test_what_a_loss_computes_of_its_targets_alone_is_computed_anew_in_fp32(tmp_path: Path, samples: int) -> None:
    """Of 8 masks the sum of squares is beyond FP16; of 2 it fits."""
    result, record = run(tmp_path, DICE.replace("SAMPLES", str(samples)))
    if samples == 2:
        assert (result.code, record.verdict, record.findings) == (0, "healthy", ())
        return
    found = record.findings[0]
    assert (found.code, found.op, record.verdict) == ("forward-overflow", "aten.bmm.default", "precision")
    assert found.message.startswith("bmm reaches 117,916 in FP32, above FP16's limit of 65,504")
    assert where(record)[3].startswith("union = ")
    patch = start(tmp_path, "suggest-fp32", captured(record)[steps_captured(record).index(1)])
    assert patch.code == 0, patch.stderr
    assert "the failing step (1): healthy" in patch.stdout
    assert "inf" not in patch.stdout
    assert "enabled=False" in patch.stdout


BESIDE = scripts.loop("""
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).cuda()
with torch.no_grad():
    net[2].weight.mul_(20000)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
for step in range(4):
    x, far = torch.rand(32, 8).cuda(), torch.rand(32, 4).cuda()
    half = torch.ones(32, 4, dtype=torch.half).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x * 25 * 2)
        loss = out.square().mean().float() * 1e-12
        loss = loss + LOSS
    STEP
""")
"""Its last layer overflows."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        "1e-12 * sum((p * p).sum() for p in net.parameters())",
        "(out * (far.to(out.dtype) * 2)).mean() * 1e-12",
        "(out * (far.half() * 2)).mean() * 1e-12",
        "((far.type_as(out) + out) * far.type_as(out)).mean() * 1e-12",
        "((far.to(out) + out) * (far * 3)).mean() * 1e-12",
        "((half.type_as(out) + out) * half.type_as(out)).mean() * 1e-12",
        "((far.half().type(out.dtype) + out) * far.half().to(out)).mean() * 1e-12",
        "(out.float() * out).mean() * 1e-18",
    ],
)
def test_a_patch_is_proven_whatever_is_computed_beside_the_place(tmp_path: Path, loss: str) -> None:
    """The script computes more of its own data by functions of the same names, and a cast may have nothing to do."""
    _, record = run(tmp_path, BESIDE.replace("LOSS", loss))
    patch = start(tmp_path, "suggest-fp32", captured(record)[steps_captured(record).index(1)])
    assert patch.code == 0, patch.stderr
    assert "the failing step (1): healthy" in patch.stdout
