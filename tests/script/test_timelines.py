"""Scripts with several optimizers: each has its own timeline."""

from pathlib import Path

import pytest

from ampdbg.record.run import Record
from tests.script import scripts
from tests.script.test_captures import capture_of, run_on_capture
from tests.script.test_run import assert_unwatched_saves_the_same, first_finding, run, steps_captured
from tests.siblings import slow_except

TEMPERATURE = scripts.loop("""
bad = int(sys.argv[1])
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
log_alpha, alpha = torch.zeros(1, requires_grad=True, device="cuda"), 1.0
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
of_alpha, scaler = torch.optim.Adam([log_alpha], 1e-3), torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(14):
    x = torch.randn(64, 16).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = alpha * (net(x) ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        p = net(x) * (1e6 if step == bad else 1.0)
    loss_of_alpha = (log_alpha.exp() * (p.float().abs().mean() * 1e-6 - 0.1)).mean()
    of_alpha.zero_grad()
    loss_of_alpha.backward()
    of_alpha.step()
    alpha = log_alpha.exp().item()
    scaler.update()
torch.save([net.state_dict(), log_alpha], "net.pt")
""")
"""As in SAC, the temperature has its own optimizer, which no scaler steps."""

OVERFLOW = "p = net(x) * (1e6 if step == bad else 1.0)"


def skips(record: Record) -> dict[int, list[int]]:
    """Returns the iterations whose step a scaler skipped, by optimizer."""
    return {one.steps[0].optimizer: [step.iteration for step in one.steps if step.skipped] for one in record.timelines}


def test_an_unscaled_step_between_scaler_step_and_update_is_named_and_replayed(tmp_path: Path) -> None:
    result, record = run(tmp_path, TEMPERATURE, "6")
    assert (result.code, record.verdict, record.steps_run) == (1, "precision", 14)
    assert first_finding(record) == ("forward-overflow", 13, "", OVERFLOW)
    assert record.findings[0].evidence["iteration"] == 6
    assert skips(record) == {0: list(range(7, 14)), 1: []}
    assert steps_captured(record)[0] == 13
    replayed, again = run_on_capture(tmp_path, "replay", capture_of(tmp_path))
    assert (replayed.code, first_finding(again)) == (1, first_finding(record))
    assert replayed.stdout.startswith("✗ The forward pass overflows at step 13,")
    assert again.findings[0].evidence["iteration"] == 6


def test_a_temperature_that_stays_finite_is_healthy_and_trains_as_without_ampdbg(tmp_path: Path) -> None:
    _, record = run(tmp_path, TEMPERATURE, "-1")
    assert (record.verdict, record.findings) == ("healthy", ())
    assert [(step.optimizer, step.scale) for step in record.steps] == [(0, 256.0), (1, 1.0)] * 14
    assert_unwatched_saves_the_same(tmp_path, "-1")


ONE_UPDATE = (
    scripts.loop("""
bad = int(sys.argv[1])
nets = [nn.Linear(8, 8).cuda() for _ in "ab"]
optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in nets]
scaler = torch.amp.GradScaler("cuda")
for step in range(14):
    x = torch.randn(32, 8).cuda()
    for net, optimizer, far in zip(nets, optimizers, (400.0, 1.0)):
        with torch.autocast("cuda", dtype=torch.float16):
            gain = 1e6 if step == bad and far == 1.0 else 1.0
            out = net(x) * gain / gain
            loss = (out - far).float().pow(2).mean() / far
        STEP
torch.save([net.state_dict() for net in nets], "net.pt")
""")
    .replace("        scaler.update()\n", "")
    .replace("torch.save", "    scaler.update()\ntorch.save")
)
"""torch's documented pattern: two optimizers, one scaler, one update."""


@pytest.mark.parametrize("bad", slow_except([9], [9, -1]))
def test_two_optimizers_with_one_update_have_a_timeline_each(tmp_path: Path, bad: int) -> None:
    _, record = run(tmp_path, ONE_UPDATE, str(bad))
    first, second = sorted(record.timelines, key=lambda one: one.steps[0].optimizer)
    assert (first.steps_run, second.steps_run, len(record.steps)) == (14, 14, 28)
    assert all(300.0 < step.loss < 500.0 for step in first.steps)
    assert all(step.loss < 2.0 for step in second.steps if step.iteration != bad)
    assert skips(record)[1] == [bad] * (bad >= 0)
    assert_unwatched_saves_the_same(tmp_path, str(bad))
    if bad < 0:
        assert record.verdict == "healthy"
        return
    assert first_finding(record)[:2] == ("forward-overflow", 2 * bad + 1)
    assert steps_captured(record)[-1] == 2 * bad + 1


BOTH_BACKWARD = scripts.loop("""
nets = [nn.Linear(8, 8).cuda() for _ in "ab"]
optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in nets]
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(14):
    x = torch.randn(32, 8).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        losses = [(net(x) - far).float().pow(2).mean() for net, far in zip(nets, (20.0, 1.0))]
    for loss, optimizer in zip(losses, optimizers):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
""")


def test_a_step_is_replayed_with_the_losses_of_its_own_optimizer_alone(tmp_path: Path) -> None:
    _, record = run(tmp_path, BOTH_BACKWARD)
    assert (record.verdict, record.findings) == ("healthy", ())
    compared = [(record.steps[made.step], made.low.loss) for made in record.investigations]
    assert [step.optimizer for step, _ in compared] == [0, 1]
    assert [loss for _, loss in compared] == pytest.approx([step.loss for step, _ in compared], rel=1e-3)
