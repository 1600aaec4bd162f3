"""Optimizers that take turns: the FP32 continuation steps only the optimizers of the failing step."""

from pathlib import Path

from tests.script import scripts
from tests.script.test_run import run_with_page

TURNS = scripts.loop("""
G, D = nn.Linear(4, 8).cuda(), nn.Linear(8, 1).cuda()
optimizers = [torch.optim.SGD(net.parameters(), lr=1e-4) for net in (D, G)]
scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in optimizers]
for turn in range(20):
    z, real = torch.randn(16, 4).cuda(), torch.randn(16, 8).cuda()
    for place in (0, 1):
        with torch.autocast("cuda", dtype=torch.float16):
            gain = 2000 if turn > 3 else 1  # which the scaler withholds at first
            loss = gain * D(G(z)).exp().sum() if place else D(G(z).detach()).mean() - D(real).mean()
        optimizers[place].zero_grad()
        scalers[place].scale(loss).backward()
        scalers[place].step(optimizers[place])
        scalers[place].update()
""")
"""From its fourth turn on, the generator's loss of 42,000 leaves gradients in the discriminator, whose next turn clears
them."""


def test_gradients_that_a_generator_leaves_in_the_discriminator_are_not_divergence(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, TURNS)
    assert (code, record.verdict) == (0, "healthy")
    assert "diverges" not in page
    found = [made for made in record.investigations if made.why != "end"]
    assert [made.step % 2 for made in found] == [1, 1]
    assert all(made.continuation[-1] < made.continuation[0] for made in found)
