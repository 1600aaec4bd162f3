"""Gradient penalties: the input needs gradients, and the loss is made of them, so that it goes backward twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import run, where
from tests.siblings import slow_but_for

PENALTY = scripts.loop("""
critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
nn.init.zeros_(critic[2].weight)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(8):
    x = torch.randn(8, 2, device="cuda").requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        y = critic(x)
    g = GRADIENT
    loss = ((torch.sqrt((g ** 2).sum(1) + SAFE) - 1) ** 2).mean()
    STEP
""")
"""A last layer of zeros has no gradient, and the root of zero no finite one, in any precision."""

GRADIENTS = {
    "twice": "torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]",
    "once": "y - y.detach()",
}


def penalty(gradient: str, safe: float) -> str:
    return PENALTY.replace("GRADIENT", GRADIENTS[gradient]).replace("SAFE", str(safe))


@pytest.mark.parametrize("gradient", slow_but_for(["twice"], GRADIENTS))
def test_a_nan_of_the_mathematics_is_one_where_the_input_needs_gradients(tmp_path: Path, gradient: str) -> None:
    _, record = run(tmp_path, penalty(gradient, 0.0))
    assert (record.verdict, *where(record)[:2]) == ("other", "true-nan", 0)
    assert where(record)[3].startswith("loss = ((torch.sqrt(")


@pytest.mark.slow
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_with_a_safe_root_it_is_healthy(tmp_path: Path, gradient: str) -> None:
    _, record = run(tmp_path, penalty(gradient, 1e-4))
    assert (record.verdict, {found.severity for found in record.findings} - {"info"}) == ("healthy", set())


GAN = scripts.loop("""
generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
nn.init.zeros_(critic[2].weight)
ours, theirs = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
scaler = torch.amp.GradScaler("cuda", init_scale=INIT)

def step(optimizer, loss):
    STEP

for _ in range(8):
    for _ in range(3):
        x = torch.randn(8, 2, device="cuda").requires_grad_(True)
        with torch.autocast("cuda"):
            y = critic(x)
        slope, = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        step(theirs, ((torch.sqrt((slope ** 2).sum(1)) - 1) ** 2).mean())
    with torch.autocast("cuda"):
        z = generator(torch.randn(8, 2, device="cuda"))
        loss = critic(z).float().mean() * 0.0 + OTHER * z.float().square().mean()
    step(ours, loss)
""")
"""Its critic never takes a step, and its generator takes each, with gradients where ``OTHER`` is not 0."""


@pytest.mark.slow
@pytest.mark.parametrize("other", [0.0, 1.0])
@pytest.mark.parametrize("options", [(), ("--no-investigate",)])
def test_no_scale_is_said_to_work_where_one_optimizer_never_steps(
    tmp_path: Path, other: float, options: tuple[str, ...]
) -> None:
    script = GAN.replace("INIT", "64.0").replace("OTHER", str(other))
    _, record = run(tmp_path, script, options=("--emulate", *options))
    assert sum(step.skipped for step in record.steps) == 24
    assert record.steps[-1].scale < 1.0
    assert not record.steps[-1].skipped
    assert [found.code for found in record.findings] == ["unknown" if options else "true-nan", "scale-collapse"]
