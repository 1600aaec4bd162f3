"""Values that an earlier half pass made inf or NaN are not a fault of the step that reads them, whatever FP32 gives."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import first_finding, run
from tests.siblings import slow_except

SPOILT = scripts.loop("""
KEEPS
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
MAKES
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(12):
    x = torch.randn(64, 16).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = LOSS
    STEP
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        p = net(x) * (1e6 if step == 6 and len(sys.argv) > 1 else 1.0)
    AFTER
""")
"""A half pass between two steps makes a value non-finite, and the next step reads the value."""

KINDS = {
    "a number": ("alpha = 1.0", "alpha * (net(x) ** 2).mean()", "alpha = 1.0 + 1e-9 * p.float().mean().item()"),
    "an infinite one": (
        "alpha = 1.0",
        "alpha * (net(x) ** 2).mean()",
        "alpha = 1.0 + 1e-9 * p.float().abs().sum().item()",
    ),
    "a leaf": (
        "alpha = torch.ones((), requires_grad=True, device='cuda')",
        "alpha * (net(x) ** 2).mean()",
        "alpha.data = alpha.data + p.float().mean() * 1e-9",
    ),
    "a target network": (
        "target = copy.deepcopy(net).requires_grad_(False)",
        "((net(x) - target(x)) ** 2).mean()",
        "[one.data.mul_(0.99).add_(1e-9 * p.float().mean()) for one in target.parameters()]",
    ),
    "an attribute": (
        "net.alpha = 1.0; net.register_forward_hook(lambda module, given, made: made * module.alpha)",
        "(net(x) ** 2).mean()",
        "net.alpha = 1.0 + 1e-9 * p.float().mean().item()",
    ),
}
"""How each value is made, read and written."""


def spoilt(kind: str) -> str:
    """Returns the script in which a value of this kind becomes non-finite."""
    makes, loss, after = KINDS[kind]
    return SPOILT.replace("KEEPS\n", "").replace("MAKES", makes).replace("LOSS", loss).replace("AFTER", after)


FOLLOWED = "a leaf"
"""The step that reads this value holds the ops of the half pass, because they made a tensor that it takes."""


@pytest.mark.slow
def test_a_leaf_that_an_earlier_half_pass_made_non_finite_leads_to_the_op_of_that_pass(tmp_path: Path) -> None:
    _, record = run(tmp_path, spoilt(FOLLOWED), "bad")
    line = "p = net(x) * (1e6 if step == 6 and len(sys.argv) > 1 else 1.0)"
    assert first_finding(record) == ("forward-overflow", 7, "", line)


@pytest.mark.parametrize(
    "kind", slow_except(["a number", "a target network"], [kind for kind in KINDS if kind != FOLLOWED])
)
def test_a_value_that_an_earlier_half_pass_made_non_finite_is_not_a_true_nan(tmp_path: Path, kind: str) -> None:
    _, record = run(tmp_path, spoilt(kind), "bad")
    assert (record.findings[0].code, record.findings[0].step) == ("weights-nonfinite", 7)
    assert "inf or NaN came into it from outside, perhaps from an earlier pass in FP16" in record.findings[0].message
    assert not {"true-nan", "infinite-loss", "data-nonfinite"} & {found.code for found in record.findings}
    assert first_finding(record)[3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_a_finite_half_pass_updates_is_healthy(tmp_path: Path, kind: str) -> None:
    _, record = run(tmp_path, spoilt(kind))
    assert (record.verdict, record.findings) == ("healthy", ())


WRITTEN = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 8)
        self.register_buffer("scale", torch.ones(1))
    def forward(self, x):
        return self.outer(self.inner(x).relu() * self.scale)

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda")
for step in range(12):
    x = torch.randn(64, 16).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x).float().square().mean()
    STEP
    with torch.no_grad():
        net.scale.copy_(torch.tensor(float(sys.argv[1]) if step >= 7 else 1.0 + 0.01 * step))
""")


@pytest.mark.parametrize("value", slow_except(["1e6", "inf", "1.1"], ["1e6", "inf", "nan", "1.1"]))
def test_a_buffer_that_the_script_overwrites_is_named_if_the_next_step_fails(tmp_path: Path, value: str) -> None:
    result, record = run(tmp_path, WRITTEN, value)
    if value == "1.1":
        assert (result.code, record.findings) == (0, ())
        return
    found = record.findings[0]
    assert (found.code, found.step) == ("weights-nonfinite", 8)
    size = {"1e6": "1,000,000", "nan": "NaN"}.get(value, value)
    assert f"right before step 8 the script itself wrote 1 buffer: scale (up to {size})" in found.message
    assert "divergence" not in {one.code for one in record.findings}
