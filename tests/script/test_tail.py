"""The script's own lines before its model or before its loss: found, replayed, searched and patched like modules."""

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import alone, captured, first_finding, run, run_with_page
from tests.siblings import slow_except

TAIL = scripts.loop("""
bad, where = {int(step) for step in sys.argv[1].split(",")}, sys.argv[2]
if where == "without a function":
    del F.scaled_dot_product_attention  # as code does that wants the other way

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        if where == "both":
            s = h @ h.t()
            h = s.softmax(-1) @ h
        return self.b(h)

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-9)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(12):
    x = torch.randn(4, 8).cuda() * (3000 if step in bad else 1)
    with torch.autocast("cuda", dtype=torch.float16):
        z = net(x)
        sim = z @ z.t()
        loss = (sim - sim.mean(-1, keepdim=True)).float().log_softmax(-1).diagonal().mean().neg()
    STEP
    print(step, loss.item())
""")
OF_SCRIPT, OF_MODEL = "sim = z @ z.t()", "s = h @ h.t()"


WAYS = [("6", ""), ("6,7,8,9,10,11", ""), ("6", "without a function")]


@pytest.mark.parametrize("way", slow_except([("6", "without a function")], WAYS), ids="-".join)
def test_an_overflow_in_a_line_of_the_script_is_named_and_replayed(tmp_path: Path, way: tuple[str, str]) -> None:
    bad, how = way
    record, page, _ = run_with_page(tmp_path, TAIL, bad, how)
    assert (record.verdict, first_finding(record)) == ("precision", ("forward-overflow", 6, "", OF_SCRIPT))
    assert [(made.step, made.reach) for made in record.investigations] == [(6, "whole")]
    assert "could not be replayed" not in page
    replayed = start(tmp_path, "replay", *captured(record), "--record", "again.json")
    assert first_finding(read_record(tmp_path / "again.json")) == ("forward-overflow", 6, "", OF_SCRIPT), (
        replayed.stderr
    )


COMPILED = scripts.loop("""
bad, way = int(sys.argv[1]), sys.argv[2]
unused = torch.compile(F.relu, backend="eager")  # as libraries do when they are imported
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), 1e-9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

@torch.compile(backend="aot_eager")
def contrast(z, target):
    sim = z @ z.t()
    loss = F.cross_entropy(sim.float() / 1e3, target)
    return scaler.scale(loss) if way == "scales" else loss

for step in range(12):
    x = torch.randn(4, 8) * (3000 if step == bad else 1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = contrast(net(x), torch.arange(4))
    optimizer.zero_grad()
    (loss if way == "scales" else scaler.scale(loss)).backward()
    scaler.step(optimizer)
    scaler.update()
print([value.tolist() for value in net.state_dict().values()])
""")


@pytest.mark.parametrize("way", slow_except(["scales"], ["", "scales"]))
def test_a_compiled_loss_is_replayed_unless_it_scales_itself(tmp_path: Path, way: str) -> None:
    record, page, _ = run_with_page(tmp_path, COMPILED, "6", way, options=())
    if way == "scales":
        assert first_finding(record)[:2] == ("unknown", 6)
        assert "the compiled function contrast also runs" in page
    else:
        assert first_finding(record) == ("forward-overflow", 6, "", OF_SCRIPT)
        assert record.investigations[0].reach == "whole"


@pytest.mark.parametrize("way", slow_except(["scales"], ["", "scales"]))
def test_a_healthy_run_with_a_compiled_loss_is_compared_with_fp32_and_unchanged(tmp_path: Path, way: str) -> None:
    result, record = run(tmp_path, COMPILED, "-1", way, options=())
    assert (record.verdict, record.findings, record.steps_run) == ("healthy", (), 12)
    assert bool(record.investigations) == (way == "")
    assert result.stdout == alone(tmp_path, "train.py", "-1", way)


WHOLE_PASS = scripts.loop("""
net = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-4)
gain = float(sys.argv[2])

def forward(x):
    with torch.autocast("cuda", dtype=torch.float16):
        z = net(x) * gain
        return net(x).float().square().mean() + (z @ z.t()).float().mean() * 1e-9

def both(x):
    loss = forward(x)
    loss.backward()
    return loss

if sys.argv[1] == "forward":
    forward = torch.compile(forward, backend="aot_eager")
else:
    both = torch.compile(both, backend="aot_eager")
for step in range(12):
    optimizer.zero_grad()
    print(both(torch.randn(4, 8).cuda()).item())
    optimizer.step()
""")
"""Its arguments: the part of a pass that is compiled with its model, and the factor before a product."""


@pytest.mark.parametrize("way", slow_except(["both"], ["forward", "both"]))
@pytest.mark.parametrize("gain", ["1", "900"])
def test_a_compiled_function_that_runs_a_model_is_named_with_what_helps(way: str, gain: str, tmp_path: Path) -> None:
    result, record = run(tmp_path, WHOLE_PASS, way, gain)
    refusal = f"the compiled function {way} also runs a model or a backward pass; compile the model alone, or set "
    assert [refusal + "TORCHDYNAMO_DISABLE=1 for one run" in note for note in record.unseen.notes] == [True]
    assert result.stdout == run(tmp_path, WHOLE_PASS, way, gain, options=("--emulate", "--no-watch"))[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forward", "both"])
@pytest.mark.parametrize(("gain", "found"), [("1", []), ("900", ["forward-overflow"])])
def test_a_run_without_the_compiler_replays_what_it_hides(
    way: str, gain: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    _, record = run(tmp_path, WHOLE_PASS, way, gain)
    assert [one.code for one in record.findings if not one.code.startswith("misuse")] == found
    assert (len(record.investigations), record.unseen.notes) == (1, ())


BALANCED = scripts.loop("""
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(6):
    x = torch.randn(4, 8).cuda()
    if step == 4 and sys.argv[1] == "data":
        x[1] = math.nan
    with torch.autocast("cuda", dtype=torch.float16):
        z = net(x)
        large = 3e3 if step == 4 and sys.argv[1] == "overflow" else 1.0
        z = (z * large) @ (torch.eye(4).double().float().cuda() * large) / large**2
        loss = F.mse_loss(z.float(), torch.ones(4, 4).cuda())
    [gradient] = torch.autograd.grad(loss, [z], retain_graph=True)
    optimizer.zero_grad()
    z.backward(gradient * (1 / (1e-12 + float(gradient.float().norm()))))  # as EnCodec's balancer of losses does
    optimizer.step()
""")
OF_PRODUCT = "z = (z * large) @ (torch.eye(4).double().float().cuda() * large) / large**2"
FAULTS = {
    "overflow": ("forward-overflow", 4, "", OF_PRODUCT),
    "data": ("data-nonfinite", 4, "", ""),
}


@pytest.mark.parametrize("fault", slow_except(["overflow"], FAULTS))
def test_a_gradient_that_the_script_passes_to_backward_is_not_bad_data(tmp_path: Path, fault: str) -> None:
    record, _, _ = run_with_page(tmp_path, BALANCED, fault)
    assert first_finding(record) == FAULTS[fault]


@pytest.mark.slow
def test_pins_cover_a_line_of_a_module_and_of_the_script_and_the_patch_is_proven(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, TAIL, "6", "both")
    assert first_finding(record)[3] == OF_MODEL
    suggested = start(tmp_path, "suggest-fp32", *captured(record), "--record", "patched.json")
    assert suggested.code == 0, suggested.stderr
    found = read_record(tmp_path / "patched.json")
    lines = {site.source.text for pin in found.pins for site in pin.sites if site.source is not None}
    assert {OF_MODEL, OF_SCRIPT} <= lines
    assert found.verification is not None
    assert found.verification.passed


CAMERA = scripts.loop("""
k = torch.tensor([[1200.0, 0.0, 320.0], [0.0, 1200.0, 240.0], [0.0, 0.0, 1.0]]).cuda()
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
optimizer, scaler = torch.optim.Adam(model.parameters(), 1e-3), torch.amp.GradScaler("cuda")
for step in range(14):
    points = float(sys.argv[1]) * (torch.rand(64, 3) + 1).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        seen = points @ k.T
        uv = seen / seen[:, 2:] / 1000
        loss = (model(uv) - 0.5).square().mean()
    STEP
""")
"""Autocast lowers a camera's matrix to half before any module is called."""


def test_an_overflow_before_the_model_call_is_not_bad_data(tmp_path: Path) -> None:
    record, page, _ = run_with_page(tmp_path, CAMERA, "50")
    assert (record.verdict, first_finding(record)) == ("precision", ("forward-overflow", 0, "", "seen = points @ k.T"))
    assert "data-nonfinite" not in page

    healthy, page, _ = run_with_page(tmp_path, CAMERA, "1")
    assert (healthy.verdict, [made.reproduced for made in healthy.investigations]) == ("healthy", [True])


@pytest.mark.slow
def test_an_overflowing_line_before_the_model_call_is_patched_and_proven(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, CAMERA, "50")
    suggested = start(tmp_path, "suggest-fp32", *captured(record), "--record", "patched.json")
    assert suggested.code == 0, suggested.stderr
    found = read_record(tmp_path / "patched.json")
    assert found.verification is not None
    assert found.verification.passed
    assert "+            seen = points @ k.T" in suggested.stdout


MEMORY = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.inner, self.outer = nn.Parameter(torch.zeros(16)), nn.Linear(16, 16), nn.Linear(16, 1)
        self.gain = 1.0

    def forward(self, x, memory):
        h = torch.tanh(self.inner(x + memory + self.bias))
        return self.outer(h) * self.gain, h.detach()

net, memory = Net().cuda(), torch.zeros(32, 16).cuda()
optimizer, scaler = torch.optim.Adam(net.parameters(), 1e-3), torch.amp.GradScaler("cuda")
for step in range(10):
    net.gain = 1e6 if step == 4 else 1.0
    with torch.autocast("cuda", dtype=torch.float16):
        output, memory = net(torch.randn(32, 16).cuda(), memory)
        loss = output.abs().mean()
    STEP
""")
"""The model returns detached state for the next step, as in Transformer-XL; the first step is skipped."""


def test_an_overflow_in_a_step_with_recurrent_state_is_named_at_its_own_step(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, MEMORY)
    line = "return self.outer(h) * self.gain, h.detach()"
    assert (record.verdict, first_finding(record)) == ("precision", ("forward-overflow", 4, "", line))
    assert record.steps[0].skipped
