"""The script's own loss code outside its modules: casts, overflowing lines and their patches, gradient penalties."""

import re
from pathlib import Path

import pytest
import torch

from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import assert_unwatched_saves_the_same, captured, first_finding, run
from tests.siblings import slow_except

CASTS = scripts.loop("""
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


@pytest.mark.parametrize("case", slow_except(["a distance", "a harmless mask"], CASES))
def test_a_cast_in_the_loss_is_an_overflow_a_mask_constant_or_healthy(tmp_path: Path, case: str) -> None:
    loss, far, verdict, code = CASES[case]
    result, record = run(tmp_path, CASTS.format(loss=loss, far=far))
    assert (result.code, record.verdict) == (int(verdict != "healthy"), verdict), result.stderr
    if code is None:
        assert record.findings == ()
        return
    assert (first_finding(record)[::3], record.findings[0].op) == ((code, f"loss = {loss}"), "aten._to_copy.default")


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
def test_a_loss_term_of_the_targets_alone_is_recomputed_in_fp32(tmp_path: Path, samples: int) -> None:
    """The sum of squares of 8 masks exceeds FP16; that of 2 masks fits."""
    result, record = run(tmp_path, DICE.replace("SAMPLES", str(samples)))
    if samples == 2:
        assert (result.code, record.verdict, record.findings) == (0, "healthy", ())
        return
    found = record.findings[0]
    assert (found.code, found.op, record.verdict) == ("forward-overflow", "aten.bmm.default", "precision")
    assert found.message.startswith("bmm reaches 117,974 in FP32, above FP16's limit of 65,504")
    assert first_finding(record)[3].startswith("union = ")
    patch = start(tmp_path, "suggest-fp32", captured(record)[0])
    assert patch.code == 0, patch.stderr
    assert "the failing step (0): healthy" in patch.stdout
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
"""The last layer overflows."""


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
def test_a_patch_is_proven_despite_other_loss_terms_and_casts_beside_the_overflow(tmp_path: Path, loss: str) -> None:
    """The script calls functions of the same names on its own data, and a cast may be a no-op."""
    _, record = run(tmp_path, BESIDE.replace("LOSS", loss))
    patch = start(tmp_path, "suggest-fp32", captured(record)[0])
    assert patch.code == 0, patch.stderr
    assert "the failing step (0): healthy" in patch.stdout


LOSSES = scripts.loop("""
kind, gain, size = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
zeros = torch.zeros(16, dtype=torch.long).cuda()


def contrasted(out):
    similar = torch.matmul(out, out.T)
    mask = torch.eye(out.shape[0], dtype=torch.bool, device=out.device)
    similar = similar[~mask].view(out.shape[0], -1)
    logits = similar * gain
    return F.cross_entropy(logits, zeros) / 1e3


def summed(out):
    return (out * gain).square().sum(dtype=out.dtype) / 1e4


def cast_itself(out):
    return (out * gain).square().sum(dtype=out.dtype).float() / 1e4


def behind(out):
    if True: return F.cross_entropy(out.half() * (gain * 10), zeros)


def plain(out):
    logits = out * (gain * 10)
    return F.cross_entropy(logits, zeros)


def targeted(out):
    return (out * 4096 * target.to(out.dtype)).mean() / 1e6


def targeted_twice(out):
    return ((out - target.to(out.dtype)) * (out - target.type_as(out))).mean() / 1e6


for step in range(5):
    x = torch.randn(16, 8).cuda() * size
    target = torch.linspace(-2.0, 2.0, 128).view(16, 8).cuda() * gain * (step + 1)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = globals()[kind](model(x))
    STEP
""")

SUM = "(out * gain).square().sum(dtype=out.dtype)"
AUTOCAST_OFF = "with torch.autocast(device_type=out.device.type, enabled=False):"


def suggested(folder: Path, kind: str, gain: str, size: str = "80") -> tuple[Record, str, str]:
    """Runs suggest-fp32 on the first captured step; returns the record, the patch and the page."""
    record = run(folder, LOSSES, kind, gain, size)[1]
    assert record.findings[0].code == "forward-overflow"
    result = start(folder, "suggest-fp32", captured(record)[0], "--record=s.json")
    return read_record(folder / "s.json"), result.stdout, " ".join(result.stderr.split())


def added(patch: str) -> list[str]:
    """Returns the lines that a diff adds."""
    return [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gain", "lines"),
    [
        (
            "contrasted",
            "30",
            [
                AUTOCAST_OFF.replace("out.", "similar."),
                "logits = similar.float() * gain",
                "return F.cross_entropy(logits, zeros) / 1e3",
            ],
        ),
        ("summed", "2", [AUTOCAST_OFF, "out = out.float()", f"return {SUM} / 1e4"]),
        ("cast_itself", "2", [AUTOCAST_OFF, "out = out.float()", f"return {SUM}.float() / 1e4"]),
    ],
)
def test_an_overflowing_loss_line_is_patched_and_proven(tmp_path: Path, kind: str, gain: str, lines: list[str]) -> None:
    record, patch, _ = suggested(tmp_path, kind, gain)
    assert record.verification is not None
    assert (record.verification.passed, added(patch)) == (True, lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "returned"),
    [
        ("targeted", "(out * 4096 * target.to(out.dtype)).mean() / 1e6"),
        ("targeted_twice", "((out - target.to(out.dtype)) * (out - target.type_as(out))).mean() / 1e6"),
    ],
)
def test_a_target_that_a_patch_no_longer_casts_is_the_captured_target(tmp_path: Path, kind: str, returned: str) -> None:
    record, patch, _ = suggested(tmp_path, kind, "900", "1")
    assert record.verification is not None
    assert (record.verification.passed, added(patch)) == (
        True,
        [AUTOCAST_OFF, "out = out.float()", f"return {returned}"],
    )
    told = {step.name: step.detail for step in record.verification.steps}
    losses = re.fullmatch(r"healthy; loss (.+), (.+) in FP32", told["the failing step (0)"])
    assert losses is not None
    in_fp32 = next(made.fp32 for made in read_record(tmp_path / "r.json").investigations if made.step == 0)
    assert in_fp32 is not None
    assert in_fp32.dtype == "float32"
    # The model before the line stays in FP16; with the target of another step the loss would be twice as large.
    assert [float(one) for one in losses.groups()] == pytest.approx([in_fp32.loss] * 2, rel=1e-2)


@pytest.mark.parametrize("kind", slow_except(["plain"], ["contrasted", "summed", "plain"]))
def test_a_loss_within_range_is_healthy(tmp_path: Path, kind: str) -> None:
    assert run(tmp_path, LOSSES, kind, "0.01", "1")[1].findings == ()


@pytest.mark.slow
def test_each_place_of_an_unpatched_set_is_listed_with_its_overflow_and_the_reason(tmp_path: Path) -> None:
    """The loss line overflows in the forward pass, and the last layer in the backward pass."""
    _, _, page = suggested(tmp_path, "behind", "200")
    assert "2 mm · train.py:51 · 81,470 in FP32 · in the backward pass" in page
    assert "train.py:31 mul · train.py:31 · 163,400 in FP32 · forward-overflow" in page
    assert "train.py:31: it follows a colon; put it on its own line first" in page


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
"""A last layer of zeros has a zero gradient, whose square root has no finite gradient in any precision."""

GRADIENTS = {"twice": "torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]", "once": "y - y.detach()"}


@pytest.mark.parametrize("gradient", slow_except(["twice"], GRADIENTS))
def test_a_square_root_of_zero_is_a_true_nan_if_the_input_needs_gradients(tmp_path: Path, gradient: str) -> None:
    _, record = run(tmp_path, PENALTY.replace("GRADIENT", GRADIENTS[gradient]).replace("SAFE", "0.0"))
    assert (record.verdict, *first_finding(record)[:2]) == ("other", "true-nan", 0)
    assert first_finding(record)[3].startswith("loss = ((torch.sqrt(")


@pytest.mark.slow
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_square_root_with_an_eps_is_healthy_if_the_input_needs_gradients(tmp_path: Path, gradient: str) -> None:
    _, record = run(tmp_path, PENALTY.replace("GRADIENT", GRADIENTS[gradient]).replace("SAFE", "1e-4"))
    assert (record.verdict, {found.severity for found in record.findings} - {"info"}) == ("healthy", set())


CRITIC = scripts.loop("""
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
"""The critic never takes a step; the generator takes every step, with nonzero gradients if ``OTHER`` is not 0."""


@pytest.mark.slow
@pytest.mark.parametrize("other", [0.0, 1.0])
@pytest.mark.parametrize("options", [(), ("--no-investigate",)])
def test_an_optimizer_that_never_steps_is_a_scale_collapse_though_another_steps(
    tmp_path: Path, other: float, options: tuple[str, ...]
) -> None:
    script = CRITIC.replace("INIT", "64.0").replace("OTHER", str(other))
    _, record = run(tmp_path, script, options=("--emulate", *options))
    assert sum(step.skipped for step in record.steps) == 24
    assert record.steps[-1].scale < 1.0
    assert not record.steps[-1].skipped
    assert [found.code for found in record.findings] == ["unknown" if options else "true-nan", "scale-collapse"]


BEYOND_HALF = scripts.loop("""
net = torch.nn.Linear(8, 4).cuda().half()
optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
for step in range(3):
    out = net(torch.randn(16, 8).cuda().half())
    out = out.masked_fill(out > 0.5, FILL)
    out.softmax(-1).square().mean().backward()
    UPDATE
""")
RAISES_ON_A_CPU_ALONE = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels take any factor")
BY_HAND = "with torch.no_grad(): [one.add_(one.grad, alpha=-RATE) for one in net.parameters()]"


@pytest.mark.parametrize(
    ("rate", "fill", "update", "code"),
    [
        ("1e-3", "-1e9", "optimizer.step()", "mask-constant"),
        pytest.param("1e6", "-1e4", "optimizer.step()", None, marks=RAISES_ON_A_CPU_ALONE),
        pytest.param("1e6", "-1e4", BY_HAND, None, marks=RAISES_ON_A_CPU_ALONE),
    ],
    ids=["a fill", "a rate", "a rate by hand"],
)
def test_a_learning_rate_beyond_fp16_is_not_a_mask_constant(
    tmp_path: Path, rate: str, fill: str, update: str, code: str | None
) -> None:
    text = BEYOND_HALF.replace("UPDATE", update).replace("RATE", rate).replace("FILL", fill)
    result, record = run(tmp_path, text)
    assert "Half without overflow" in result.stderr
    assert result.code == 1
    assert ("mask-constant" in [found.code for found in record.findings]) is (code is not None)
    assert record.verdict == ("other" if code else "inconclusive")
    assert code or "cannot be converted" in record.error


KEPT_BY_THE_MODEL = scripts.loop("""
class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, y, bad):
        h = self.a(x)
        h = h + (h * 0).sqrt() if bad else h
        self.last_loss = F.cross_entropy(self.b(h), y)
        return h

net = Net().cuda()
before = torch.ones((), requires_grad=True).clone()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(8):
    x, y = torch.randn(16, 8).cuda(), torch.randint(0, 4, (16,)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        net(x, y, step == 4)
    loss = Same.apply(net.last_loss) if "function" in sys.argv else net.last_loss
    loss = loss * before if "before" in sys.argv else loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""")


@pytest.mark.parametrize("by", ["itself", "function"])
def test_a_loss_that_the_model_keeps_as_an_attribute_is_replayed(tmp_path: Path, by: str) -> None:
    _, record = run(tmp_path, KEPT_BY_THE_MODEL, by)
    assert first_finding(record) == ("true-nan", 4, "", "h = h + (h * 0).sqrt() if bad else h")


def test_non_finite_gradients_that_reach_the_weights_are_named_at_their_step(tmp_path: Path) -> None:
    _, record = run(tmp_path, KEPT_BY_THE_MODEL, "before")
    found = record.findings[0]
    assert (found.code, found.step, found.phase) == ("unknown", 4, "backward")
    assert found.message.startswith("gradients are not finite at step 4, and went into the weights")


OF_EACH_LAYER = scripts.loop("""
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down, self.size = nn.Linear(16, 4), nn.Linear(16, 16), 1.0

    def forward(self, x):
        logits = self.gate(x) * self.size
        self.balance = (logits @ logits.t()).float().logsumexp(-1).mean() / self.size**2
        return x + self.down(x)

layers = nn.Sequential(Experts(), Experts(), nn.Linear(16, 4)).cuda()
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(14):
    x, y = torch.randn(8, 16).cuda(), torch.randint(0, 4, (8,)).cuda()
    layers[1].size = 2000.0 if step == 12 else 1.0
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(layers(x), y) + 0.01 * sum(layer.balance for layer in layers[:2])
    kept = layers[1].balance
    STEP
    assert layers[1].balance is kept
torch.save([layers.state_dict(), torch.rand(3)], "net.pt")
""")
"""A mixture of experts keeps its balance loss this way."""


def test_an_overflow_of_a_loss_that_a_layer_keeps_is_named_in_run_and_replay(tmp_path: Path) -> None:
    _, record = run(tmp_path, OF_EACH_LAYER)
    line = "self.balance = (logits @ logits.t()).float().logsumexp(-1).mean() / self.size**2"
    assert first_finding(record) == ("forward-overflow", 12, "1", line)
    assert [(made.step, made.reach) for made in record.investigations] == [(10, "whole"), (12, "whole")]
    assert_unwatched_saves_the_same(tmp_path)
    start(tmp_path, "replay", *captured(record), "--record", "again.json")
    assert first_finding(read_record(tmp_path / "again.json")) == ("forward-overflow", 12, "1", line)


STYLE = scripts.loop("""
maker = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(), nn.Linear(64, 64)).cuda()
critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1)).cuda()
ours, theirs = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
scalers = {ours: torch.amp.GradScaler("cuda"), theirs: torch.amp.GradScaler("cuda")}

def step(optimizer, loss):
    optimizer.zero_grad()
    scalers[optimizer].scale(loss).backward()
    scalers[optimizer].step(optimizer)
    scalers[optimizer].update()

def slope(optimizer, output, of):
    scaled = torch.autograd.grad(scalers[optimizer].scale(output), of, create_graph=True)[0]
    return scaled / scalers[optimizer].get_scale()

mean = 0.0
for i in range(36):
    real, noise = torch.randn(8, 64).cuda(), torch.randn(8, 16).cuda()
    with torch.autocast("cuda"):
        loss = nn.functional.softplus(torch.cat([-critic(real), critic(maker(noise).detach())])).mean()
    step(theirs, loss)
    if i % 16 == 0:
        real.requires_grad_(True)
        with torch.autocast("cuda"):
            output = critic(real)
        step(theirs, 5 * slope(theirs, 20 * output.float().sum(), real).square().sum(1).mean())
    with torch.autocast("cuda"):
        loss = nn.functional.softplus(-critic(maker(noise))).mean()
    step(ours, loss)
    if i % 4 == 0:
        noise.requires_grad_(True)
        with torch.autocast("cuda"):
            fake = maker(noise).float()
        length = slope(ours, (50 * fake * torch.randn_like(fake)).sum(), noise).square().sum(1).sqrt()
        if GUARD:
            mean = mean + 0.01 * (length.mean().detach() - mean)
        step(ours, (length - mean).square().mean())
""")
"""Both optimizers have steps that a lower scale fixes; the running mean of lengths keeps its first NaN."""


def test_a_nan_kept_in_a_running_mean_is_named_among_two_optimizers_with_penalties(tmp_path: Path) -> None:
    _, record = run(tmp_path, STYLE.replace("GUARD", "True"))
    assert first_finding(record)[:2] == ("weights-nonfinite", 12)
    assert first_finding(record)[3] == "mean = mean + 0.01 * (length.mean().detach() - mean)"
    assert [(found.code, found.root) for found in record.findings] == [
        ("weights-nonfinite", None),
        ("scale-collapse", 0),
    ]
    assert all(made.why == "gradients" and made.reproduced for made in record.investigations)
    again = start(tmp_path, "replay", captured(record)[0])
    assert "step 12 is not finite in FP32 either, first in sub" in " ".join(again.stdout.split()), again.stderr


def test_a_scale_that_still_falls_to_fit_a_penalty_is_not_a_collapse(tmp_path: Path) -> None:
    _, record = run(tmp_path, STYLE.replace("GUARD", "length.isfinite().all()"))
    assert (record.verdict, [found.code for found in record.findings]) == ("healthy", ["scale-calibration"])
    assert "it has not settled yet" in record.findings[0].message


REFERENCE = scripts.loop("""
net, reference = (nn.Linear(8, 4).cuda().to(torch.bfloat16) for _ in range(2))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for i in range(4):
    x = torch.randn(16, 8).cuda().to(torch.bfloat16)
    with torch.no_grad():
        known = reference(x)
    loss = (net(x) - known).float().square().mean()
    if i == 2:
        loss = loss + torch.log(loss - 50)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""")


def test_a_true_nan_beside_a_bfloat16_reference_model_is_named_at_its_line(tmp_path: Path) -> None:
    _, record = run(tmp_path, REFERENCE)
    assert (record.verdict, *first_finding(record)[:2]) == ("other", "true-nan", 2)
    assert first_finding(record)[3] == "loss = loss + torch.log(loss - 50)"


NOISY = scripts.loop("""
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6)).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for i in range(14):
    with torch.autocast("cuda", dtype=torch.float16):
        mean, spread = net(torch.randn(8, 8).cuda()).chunk(2, -1)
        action = torch.distributions.Normal(mean, spread.tanh().exp() * 0.5).rsample().tanh()
        loss = (1 - FACTOR * action.square()).log().mean()
    STEP
""")


@pytest.mark.parametrize(("factor", "found"), [("1", ()), ("2", ("true-nan",))])
def test_a_log_of_drawn_noise_is_a_true_nan_only_if_its_argument_is_negative(
    tmp_path: Path, factor: str, found: tuple[str, ...]
) -> None:
    _, record = run(tmp_path, NOISY.replace("FACTOR", factor))
    assert tuple(one.code for one in record.findings if one.root is None) == found
