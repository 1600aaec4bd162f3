"""Scripts that train several models: captures, pins and patches of their steps work as described."""

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_captures import capture_of, run_on_capture
from tests.script.test_run import captured, first_finding, run, steps_captured
from tests.siblings import slow_except

SEVERAL = scripts.loop("""
class Mix(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        similar = (x * self.gain) @ (x * self.gain).transpose(-1, -2)
        return x + similar.mean(-1, keepdim=True) * 1e-6


class Generator(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.up, self.mix, self.out = nn.Linear(8, 16), Mix(gain), nn.Linear(16, 8)

    def forward(self, x):
        return self.out(self.mix(self.up(x)))


def made(gain):
    return nn.DataParallel(Generator(gain)).cuda()


class Trainer:
    def __init__(self):
        self.there = made(400.0)  # <- here
        self.back = made(1.0)
        self.critic = nn.Linear(8, 1).cuda()
        generators = [*self.there.parameters(), *self.back.parameters()]
        self.optimizers = [torch.optim.Adam(one, 1e-3) for one in (self.critic.parameters(), generators)]
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)

    def train(self):
        for _ in range(6):
            noise, real = torch.randn(16, 8).cuda(), torch.randn(16, 8).cuda()
            with torch.autocast("cuda"):
                fake = self.back(self.there(noise))
                loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
            self.step(self.optimizers[0], loss)
            with torch.autocast("cuda"):
                loss = -self.critic(self.back(self.there(noise))).mean()
            self.step(self.optimizers[1], loss)
            self.scaler.update()


Trainer().train()
""")
"""The first of two generators of one class overflows; no model is a variable of the script."""


@pytest.mark.slow
def test_the_pins_file_fixes_the_model_that_its_argument_names(tmp_path: Path) -> None:
    run(tmp_path, SEVERAL)
    result, record = run_on_capture(
        tmp_path, "suggest-fp32", capture_of(tmp_path), "--format=module", "--output=ampdbg_pins.py"
    )
    assert result.code == 0
    assert record.search is not None
    assert record.verification is not None
    (root,), (pin,) = record.search.roots, record.pins
    line = SEVERAL.splitlines().index("        self.there = made(400.0)  # <- here") + 1
    assert pin.name == f"{root.name}.mix"
    assert root.what == f"the model of class Generator that line {line} of train.py makes"
    proven = {step.name: step.detail for step in record.verification.steps}
    assert proven["this file"] == (f"imported, and called with {root.what}: ampdbg_pins.pin_fp32({root.argument}=...)")
    call = f"import ampdbg_pins; ampdbg_pins.pin_fp32({root.argument}=self.there)"
    script = SEVERAL.replace("  # <- here", f"; {call}")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    pinned = start(tmp_path, "run", "--emulate", "--record=p.json", "train.py")
    after = read_record(tmp_path / "p.json")
    assert (pinned.code, after.verdict, after.steps_run) == (0, "healthy", 6)


SHARED = scripts.loop("""
shift, scale = map(float, sys.argv[1:])
netG = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).cuda()
netD = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid()).cuda()
nn.init.constant_(netD[0].bias, shift)
optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (netG, netD)]
scaler = torch.amp.GradScaler("cuda", init_scale=scale)
criterion = nn.BCELoss()
one, zero = torch.ones(16, 1).cuda(), torch.zeros(16, 1).cuda()
for step in range(20):
    real = torch.randn(16, 8).cuda()
    optimizers[0].zero_grad()
    with torch.autocast("cuda"):
        fake = netG(torch.randn(16, 8).cuda())
        lossG = -torch.log(netD(fake) + 1e-6).mean()
    scaler.scale(lossG).backward()
    scaler.step(optimizers[0])
    optimizers[1].zero_grad()
    with torch.autocast("cuda"):
        of_real, of_fake = netD(real), netD(fake.detach())
    lossD = criterion(of_real.float(), one) + criterion(of_fake.float(), zero)
    scaler.scale(lossD).backward()
    scaler.step(optimizers[1])
    scaler.update()
""")
"""With logits shifted by -18, a low scale fixes the generator's step, but no scale the discriminator's."""


@pytest.mark.slow
def test_the_optimizer_that_no_scale_fixes_is_blamed_if_two_share_a_scaler(tmp_path: Path) -> None:
    result, record = run(tmp_path, SHARED, "-18", "65536")
    assert (result.code, record.verdict, record.steps_skipped) == (1, "precision", 36)
    root, collapse = record.findings
    assert (root.step, root.op) == (1, "aten.binary_cross_entropy_backward.default")
    assert first_finding(record)[3] == "lossD = criterion(of_real.float(), one) + criterion(of_fake.float(), zero)"
    assert (collapse.code, collapse.root) == ("scale-collapse", 0)
    lines = [made.low.producers[0].source for made in record.investigations]
    # The last is the first whose scale can fall no further.
    assert [line.text.split(" =")[0] if line else "" for line in lines] == [*["lossG", "lossD"] * 2, "lossD"]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "skipped"), [("16777216", 6 + 8), ("65536", 0)])
def test_two_optimizers_whose_shared_scale_settles_are_healthy(tmp_path: Path, scale: str, skipped: int) -> None:
    result, record = run(tmp_path, SHARED, "0", scale)
    assert (result.code, record.verdict, record.steps_skipped) == (0, "healthy", skipped)
    assert [found.code for found in record.findings] == ["scale-calibration"] * bool(skipped)
    assert [len(one.steps) for one in record.timelines] == [20, 20]
    compared = [record.steps[made.step] for made in record.investigations if made.why == "end"]
    assert {step.optimizer for step in compared} == {0, 1}


UPDATED = "scaler.step(optimizer=optimizers[1]); scaler.update()"
ASKED_FOR = scripts.GAN.replace(
    "    scaler.scale(lossG)", "    print(step, lossD.item(), lossG.item())\n    scaler.scale(lossG)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gain", "steps", "asked", "turn", "code"),
    [
        ("1.0", "True", 11, 2, 0),
        ("(1e9 if step == 5 else 1.0)", "True", 11, 2, 1),
        ("(1e9 if step == 5 else 1.0)", "True", 10, 1, 0),  # the discriminator's step, which is healthy
        ("1.0", "step != 5", 10, 1, 0),  # the generator skips its turn
        ("(1e9 if step == 5 else 1.0)", "step % 3 == 2", 7, 2, 1),  # the generator skipped its turn before
    ],
)
def test_the_requested_step_is_captured_if_two_optimizers_share_one_update(
    tmp_path: Path, gain: str, steps: str, asked: int, turn: int, code: int
) -> None:
    text = ASKED_FOR.replace("GAIN", gain).replace(
        "scaler.step(optimizers[0])", f"{steps} and scaler.step(optimizers[0])"
    )
    trained, watched = run(tmp_path, text, options=("--emulate", f"--capture-step={asked}"))
    losses = [line.split() for line in trained.stdout.splitlines() if line[:1].isdigit()]
    path = capture_of(tmp_path)
    assert path.stem.endswith(f"step-{asked}")
    assert not [note for note in watched.unseen.notes if "captured" in note]
    result, record = run_on_capture(tmp_path, "replay", path)
    assert (result.code, [found.code for found in record.findings]) == (code, ["gradient-overflow"] * code)
    replay = record.investigations[0].low
    assert replay.loss == pytest.approx(float(losses[5][turn]), rel=1e-3)
    assert replay.scale == 65536.0


GENERATOR_FIRST = scripts.loop("""
bad = sys.argv[1]
netG, netD = nn.Linear(8, 16).cuda(), nn.Linear(16, 1).cuda()
optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (netG, netD)]
scaler, criterion = torch.amp.GradScaler("cuda", init_scale=1024.0), nn.BCEWithLogitsLoss()
one, zero = torch.ones(4, 1).cuda(), torch.zeros(4, 1).cuda()

def root(of):
    return (of - of.detach()).float().pow(2).sum().sqrt()

for step in range(8):
    real = torch.randn(4, 16).cuda()
    optimizers[0].zero_grad()
    with torch.autocast("cuda"):
        fake = netG(torch.randn(4, 8).cuda())
        out = netD(fake)
        loss = criterion(out, one) + (root(out) if step == 3 and bad == "G" else 0.0)
    scaler.scale(loss).backward()
    scaler.step(optimizers[0])
    optimizers[1].zero_grad()
    with torch.autocast("cuda"):
        out = netD(fake.detach())
        loss = criterion(netD(real), one) + criterion(out, zero) + (root(out) if step == 3 and bad == "D" else 0.0)
    scaler.scale(loss).backward()
    scaler.step(optimizers[1])
    scaler.update()
    print(step, loss.item())
""")


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "asked"), [("G", 6), ("D", 7), ("", 7)])
def test_the_requested_step_is_replayed_if_the_generator_steps_first(tmp_path: Path, bad: str, asked: int) -> None:
    trained, watched = run(tmp_path, GENERATOR_FIRST, bad, options=("--emulate", f"--capture-step={asked}"))
    path = capture_of(tmp_path)
    assert path.stem.endswith(f"step-{asked}")
    assert not [note for note in watched.unseen.notes if "captured" in note]
    result, record = run_on_capture(tmp_path, "replay", path)
    for one in (watched, record):
        assert [(found.code, found.step) for found in one.findings] == [("true-nan", asked)] * bool(bad)
    made = record.investigations[0]
    if not bad:
        last = float(trained.stdout.splitlines()[3].split()[1])
        assert made.low.loss == pytest.approx(last, rel=1e-3)
        return
    assert (result.code, first_finding(record)[3]) == (1, "return (of - of.detach()).float().pow(2).sum().sqrt()")


def test_a_requested_step_that_the_script_does_not_reach_is_noted(tmp_path: Path) -> None:
    _, record = run(tmp_path, GENERATOR_FIRST, "", options=("--emulate", "--capture-step=16"))
    assert record.unseen.notes == ("step 16 was not captured: the script made only 16 steps, counted from 0",)
    assert captured(record) == []


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "turn"), [(6, 1), (7, 2)])
def test_the_requested_step_is_captured_if_each_optimizer_has_its_own_update(
    tmp_path: Path, asked: int, turn: int
) -> None:
    """Also the generator's step, whose picture was made in the discriminator's step before."""
    text = ASKED_FOR.replace("GAIN", "1.0").replace("    scaler.step(optimizers[1])\n", f"    {UPDATED}\n")
    trained, record = run(tmp_path, text, options=("--emulate", f"--capture-step={asked}"))
    assert (record.steps_run, steps_captured(record)) == (8, [asked])
    losses = [line.split() for line in trained.stdout.splitlines() if line[:1].isdigit()]
    result, again = run_on_capture(tmp_path, "replay", capture_of(tmp_path))
    assert (result.code, again.verdict) == (0, "healthy")
    replay = again.investigations[0].low
    assert replay.loss == pytest.approx(float(losses[3][turn]), rel=1e-3)
    assert replay.scale == 65536.0
    assert f"Step {asked}, replayed" in result.stdout
    assert "FP16, loss scale 65,536  " in result.stdout


AFTER_THE_CRITIC = scripts.loop("""
how, bad, many = sys.argv[1], set(sys.argv[2].split(",")), int(sys.argv[3])

class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out, self.length = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 1)
        self.is_bad = False

    def forward(self, x):
        h = self.body(x)
        length = self.length(h)
        if self.is_bad and how == "overflow":
            length = length + ((h * 600.0) @ (h * 600.0).t()).mean(-1, keepdim=True)
        if self.is_bad and how == "nan":
            length = torch.log(length * 0.0) * 0.0
        return self.out(h), length

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, real, fake):
        return self.net(real), self.net(fake)

def loss_of_critic(real, fake):
    total = 0.0
    for target, given in ((1, real), (0, fake)):
        total += (given.float() - target).square().mean()
    return total

net_g, net_d = Generator().cuda(), Critic().cuda()
optim_g, optim_d = (torch.optim.AdamW(net.parameters(), 1e-3) for net in (net_g, net_d))
scaler = torch.amp.GradScaler("cuda", init_scale=256)
for step in range(many):
    net_g.is_bad = str(step) in bad
    x, y = torch.randn(16, 8).cuda(), torch.randn(16, 8).cuda()
    with torch.autocast("cuda"):
        fake, length = net_g(x)
        loss_d = loss_of_critic(*net_d(y, fake.detach()))
    optim_d.zero_grad()
    scaler.scale(loss_d).backward()
    scaler.unscale_(optim_d)
    scaler.step(optim_d)
    with torch.autocast("cuda"):
        loss_g = (1 - net_d(y, fake)[1].float()).square().mean() + length.float().square().mean()
    optim_g.zero_grad()
    scaler.scale(loss_g).backward()
    scaler.unscale_(optim_g)
    scaler.step(optim_g)
    scaler.update()
""")
"""The critic steps before the generator's loss is made from the generator's earlier output."""

LENGTH = "length = length + ((h * 600.0) @ (h * 600.0).t()).mean(-1, keepdim=True)"
FAILS = {
    "overflow": ("precision", "forward-overflow", LENGTH),
    "nan": ("other", "true-nan", "length = torch.log(length * 0.0) * 0.0"),
}
"""The verdict, code and line of each fault."""


@pytest.mark.parametrize("how", slow_except(["overflow"], FAILS))
@pytest.mark.parametrize("bad", slow_except(["8"], ["8", "8,9,10"]))
def test_a_generator_that_fails_after_the_critics_step_is_named(tmp_path: Path, how: str, bad: str) -> None:
    _, record = run(tmp_path, AFTER_THE_CRITIC, how, bad, "11")
    verdict, code, line = FAILS[how]
    assert (record.verdict, record.steps_skipped) == (verdict, len(bad.split(",")))
    assert first_finding(record) == (code, 17, "net_g", line)
    assert [(made.step, made.reach) for made in record.investigations] == [(17, "whole")]


@pytest.mark.slow
def test_the_capture_of_a_generator_that_fails_in_the_last_step_is_replayed(tmp_path: Path) -> None:
    run(tmp_path, AFTER_THE_CRITIC, "overflow", "8", "9")
    result, record = run_on_capture(tmp_path, "replay", capture_of(tmp_path))
    assert (result.code, first_finding(record)) == (1, ("forward-overflow", 17, "net_g", LENGTH))


@pytest.mark.slow
def test_a_generator_without_a_fault_is_healthy_after_the_critics_step(tmp_path: Path) -> None:
    _, record = run(tmp_path, AFTER_THE_CRITIC, "overflow", "", "11")
    assert (record.verdict, record.findings, record.unseen.notes) == ("healthy", (), ())


BESIDE_BOTH = scripts.loop("""
first, second = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).cuda(), nn.Sequential(nn.Linear(16, 4)).cuda()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-4)
scaler, basis = torch.amp.GradScaler("cuda", init_scale=64.0), torch.full((4, 4), 300.0).cuda()

def spectrum(y):
    return torch.matmul(y * 300.0, basis) / 300.0**2  # HERE

for step in range(6):
    x = torch.randn(16, 8).cuda() + 3.0
    with torch.autocast("cuda", dtype=torch.float16):
        out = second(first(x))
        loss = (spectrum(out) if step > 1 else out.float()).float().square().mean()
    STEP
""")


@pytest.mark.slow
def test_an_overflowing_line_outside_of_two_models_is_patched(tmp_path: Path) -> None:
    _, record = run(tmp_path, BESIDE_BOTH, options=("--emulate",))
    found = record.findings[0]
    line = next(n for n, text in enumerate(BESIDE_BOTH.splitlines(), start=1) if text.endswith("# HERE"))
    assert (found.code, found.source and found.source.line) == ("forward-overflow", line)
    result, again = run_on_capture(tmp_path, "suggest-fp32", capture_of(tmp_path))
    assert (result.code, again.search and again.search.outcome) == (0, "found")
    assert [pin.source and pin.source.line for pin in again.pins] == [line]
    assert "+    with torch.autocast(device_type=y.device.type, enabled=False):" in result.stdout
    assert "the patch for it is proven on the failing step" in " ".join(result.stderr.split())
