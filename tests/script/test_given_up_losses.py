"""A loss that is not finite, behind which a module is called again: given up by the loop, or a part of a larger one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import alone, run
from tests.siblings import slow_but_for

PARTS = scripts.loop("""
way, bad = sys.argv[1], {*map(int, sys.argv[2:])}

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)
    def forward(self, x):
        return self.a(x)

net, criterion = Critic(), nn.MSELoss()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=64.0)
made = 0
for step in range(8):
    real, fake, target = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 4)
    if step in bad:
        target[2, 1] = float("nan")
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(net(real), target)
        if way == "given up" and not torch.isfinite(loss):
            continue
        if way == "heads":
            loss = loss + criterion(loss.detach() * 0 + loss, torch.zeros(()))
        if way == "critic":
            loss = loss + criterion(net(fake), target.nan_to_num())
        if way == "penalty":
            fake.requires_grad_()
            slope, = torch.autograd.grad(net(fake).sum(), fake, create_graph=True)
            loss = loss + criterion(slope, torch.zeros_like(slope)) + criterion(net(real), target.nan_to_num())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    made += 1
print(made, [weight.double().sum().item() for weight in net.parameters()])
""")
"""``way`` says what becomes of a loss; the target is NaN in the steps of these numbers."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["heads", "critic", "penalty"])
@pytest.mark.parametrize("bad", [("3",), ("3", "4", "7")])
def test_a_loss_of_several_parts_is_one_step(way: str, bad: tuple[str, ...], tmp_path: Path) -> None:
    result, record = run(tmp_path, PARTS, way, *bad, options=())
    assert (record.steps_run, record.steps_skipped) == (8, len(bad))
    assert result.stdout == alone(tmp_path, "train.py", way, *bad)


@pytest.mark.parametrize("bad", slow_but_for([("3",)], [("3",), ("3", "4", "7")]))
def test_each_loss_that_is_given_up_is_a_step(bad: tuple[str, ...], tmp_path: Path) -> None:
    result, record = run(tmp_path, PARTS, "given up", *bad, options=())
    assert (record.steps_run, record.steps_skipped) == (8, len(bad))
    assert [step.step for step in record.steps if step.skipped] == [*map(int, bad)]
    assert result.stdout.startswith(f"{8 - len(bad)} ")
    assert result.stdout == start(tmp_path, "run", "--no-watch", "train.py", "given up", *bad).stdout
