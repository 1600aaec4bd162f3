"""A loss scale that nothing lowers: a scaler with a minimum, or a constant factor of the script."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_captures import run_on_capture
from tests.script.test_run import captured, first_finding, run_with_page
from tests.siblings import slow_except

FLOOR = scripts.loop("""
class FloorScaler(torch.amp.GradScaler):
    def update(self, new_scale=None):
        super().update(new_scale)
        self._scale.clamp_(min=float(sys.argv[1]))

net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-5)
scaler = FloorScaler("cuda")
for step in range(24):
    x, y = torch.randn(64, 32).cuda(), torch.randn(64, 8).cuda() * 5
    with torch.autocast("cuda"):
        loss = F.mse_loss(net(x).float(), y, reduction="sum")
    STEP
""")
"""The gradients of a summed loss fit a loss scale of a few hundred."""


@pytest.mark.parametrize("floor", slow_except(["16384"], ["16384", "1"]))
def test_a_scaler_whose_minimum_scale_is_too_high_is_an_error(tmp_path: Path, floor: str) -> None:
    record, page, code = run_with_page(tmp_path, FLOOR, floor)
    if floor == "1":
        assert (code, record.verdict, [found.severity for found in record.findings]) == (0, "healthy", ["info"])
        return
    (found,) = record.findings
    assert (code, record.verdict, found.code, found.severity) == (1, "other", "scale-calibration", "error")
    assert "The loss scale 16,384 is too large, and nothing lowers it: 24 of 24 steps skipped." in page
    assert found.message.startswith(
        "the loss scale, whose lower limit is 16,384, is too large for the gradients of this"
    )
    assert "let GradScaler lower the scale" in found.remedy


OWN = scripts.loop("""
gain = float(sys.argv[1])
net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1)).cuda().half()
masters = [weight.detach().float().clone().requires_grad_() for weight in net.parameters()]
optimizer = torch.optim.Adam(masters, 1e-3)
for step in range(12):
    x = torch.randn(64, 32).cuda().half()
    loss = gain * F.mse_loss(net(x).float(), x[:, :1].float())
    net.zero_grad()
    (loss * 1024).backward()
    for master, weight in zip(masters, net.parameters()):
        master.grad = weight.grad.float() / 1024
    optimizer.step()
    with torch.no_grad():
        for master, weight in zip(masters, net.parameters()):
            weight.copy_(master)
""")
"""Half weights with FP32 masters, and the script's own loss scale."""


@pytest.mark.parametrize("gain", slow_except(["30000"], ["30000", "1"]))
def test_the_scripts_own_loss_scale_is_an_error_only_if_too_large(tmp_path: Path, gain: str) -> None:
    record, page, code = run_with_page(tmp_path, OWN, gain)
    if gain == "1":
        assert (code, record.verdict, record.findings) == (0, "healthy", ())
        assert "the script's own loss scale 1,024 · step 10 agrees with FP32" in " ".join(page.split())
        return
    assert (code, record.verdict, *first_finding(record)[:2]) == (1, "other", "scale-calibration", 0)
    assert "The loss scale 1,024 is too large, and nothing lowers it" in page
    assert record.findings[0].message.startswith(
        "the script's own loss scale 1,024 is too large for the gradients of this"
    )
    assert record.findings[0].evidence["survives_scale"] == 2.0


def test_the_page_says_that_no_scaler_was_used_and_shows_no_loss_scale(tmp_path: Path) -> None:
    _, page, _ = run_with_page(tmp_path, OWN.replace("1024", "1"), "1")
    assert "no scaler used" in page
    assert "loss scale" not in page


NEAR_ONE = scripts.loop("""
net = nn.Linear(8, 8).cuda()
nn.init.normal_(net.weight, std=3.0)
optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-3), torch.amp.GradScaler("cuda", init_scale=16.0)
for step in range(6):
    with torch.autocast("cuda"):
        p = torch.sigmoid(net(torch.randn(16, 8).cuda()))
        loss = WHAT
    STEP
""")

AT_ONE = {
    "log1p": ("-torch.log1p(-p.clamp(max=1 - 1e-6)).float().mean()", "-1"),
    "atanh": ("torch.atanh(p.clamp(max=1 - 1e-6)).float().mean()", "-1 or 1"),
    "logit": ("torch.logit(p.clamp(1e-6, 1 - 1e-6)).float().mean()", "0 or 1"),
}


@pytest.mark.parametrize("op", slow_except(["log1p"], AT_ONE))
def test_a_clamp_bound_that_fp16_rounds_to_1_is_an_eps_underflow(tmp_path: Path, op: str) -> None:
    loss, pole = AT_ONE[op]
    record, page, _ = run_with_page(tmp_path, NEAR_ONE.replace("WHAT", loss))
    found = record.findings[0]
    assert (found.code, found.step, found.op) == ("eps-underflow", 0, f"aten.{op}.default")
    assert f"{op} is given a value that FP16 rounds to {pole} and FP32 does not" in found.message
    assert "clamp p to at most 0.9990" in found.remedy
    assert "ampdbg suggest-fp32" in page


@pytest.mark.slow
def test_a_clamp_above_the_failing_line_is_pinned_instead_of_the_whole_model(tmp_path: Path) -> None:
    """The clamp, which rounds to 1, is one line above the logarithm of 1 - p."""
    bound = "p = torch.sigmoid(10 * logits).clamp(1e-7, 1 - 1e-7)"
    script = NEAR_ONE.replace(
        "p = torch.sigmoid(net(torch.randn(16, 8).cuda()))", "logits = net(torch.randn(16, 8).cuda())"
    )
    script = script.replace("        loss = WHAT", f"        {bound}\n        loss = -torch.log(1 - p).float().mean()")
    record, _, _ = run_with_page(tmp_path, script)
    suggested, found = run_on_capture(tmp_path, "suggest-fp32", Path(captured(record)[0]))
    assert (suggested.code, [pin.source and pin.source.text for pin in found.pins]) == (0, [bound])
    assert "+            p = torch.sigmoid(10 * logits.float()).clamp(1e-7, 1 - 1e-7)" in suggested.stdout
