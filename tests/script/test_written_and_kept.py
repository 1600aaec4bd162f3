"""Tensors that the script later overwrites or keeps in its model: the step is replayed and captured whole."""

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import assert_unwatched_saves_the_same, captured, first_finding, run, steps_captured
from tests.siblings import slow_except

FILLS_IN = scripts.loop("""
gain, calls = float(sys.argv[1]), int(sys.argv[2])

def main():
    pose = nn.Linear(16, 3).cuda()
    optimizer = torch.optim.SGD(pose.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(6):
        x = torch.randn(8, 16)
        with torch.autocast("cuda", dtype=torch.float16):
            x = x.to("cuda")
            y = pose(x).float()
            moved = torch.zeros(8, 4, 4).to(device=y.device)
            moved[:, :3, 3] = y
            moved[..., 2] += gain
            moved[:, 3, 3] = 1
            points = torch.matmul(moved, torch.full((8, 4, 1), gain, device="cuda"))
            seen = torch.nan_to_num(points[:, :2] / points[:, 2:3]).float()
            made = [y * number for number in range(calls)]
            loss = seen.mean() * 1e-3 + torch.stack(made).mean() * 1e-3
        STEP
    torch.save(pose.state_dict(), "net.pt")

main()
""")
"""A product overflows with a gain of 1e3, which the loss does not show; ``made`` is kept until the next step."""


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 500])
def test_a_step_that_fills_in_a_moved_tensor_is_replayed_at_its_first_failure(tmp_path: Path, calls: int) -> None:
    result, record = run(tmp_path, FILLS_IN, "1e3", str(calls))
    line = 'points = torch.matmul(moved, torch.full((8, 4, 1), gain, device="cuda"))'
    assert (result.code, *first_finding(record)) == (1, "forward-overflow", 0, "", line)
    assert ([made.step for made in record.investigations], record.unseen.notes) == ([0, 4], ())
    assert steps_captured(record) == [0, 4]
    assert_unwatched_saves_the_same(tmp_path, "1e3", str(calls))


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 500])
def test_a_step_that_fills_in_a_moved_tensor_without_an_overflow_is_healthy(tmp_path: Path, calls: int) -> None:
    result, record = run(tmp_path, FILLS_IN, "1", str(calls))
    assert (result.code, record.verdict, record.findings, record.steps_skipped) == (0, "healthy", (), 0)
    assert not any("could not" in note for note in record.unseen.notes)
    assert_unwatched_saves_the_same(tmp_path, "1", str(calls))


KEEPS = scripts.loop("""
gain = float(sys.argv[1])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        self.outputs = {"body": self.body(x)}
        return self.outputs

def main():
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(6):
        x, y = torch.randn(8, 16), torch.randn(8, 4)
        with torch.autocast("cuda", dtype=torch.float16):
            x, y = x.to("cuda"), y.to("cuda")
            outputs = net(x)
            outputs["target"] = y
            head = net.head.weight.to(x.dtype)
            z = F.linear(outputs["body"] * gain, head)
            similar = z @ z.T
            beside = F.l1_loss(torch.cat([z, y]), torch.cat([y, z]))
            loss = similar.float().mean() / gain**2 + beside / gain
        STEP
    torch.save(net.state_dict(), "net.pt")

main()
""")
"""The model keeps its outputs, and the script adds its targets to them; ``similar`` overflows with a gain of 1e3."""


@pytest.mark.slow
def test_a_captured_step_whose_data_the_model_keeps_has_a_proven_patch(tmp_path: Path) -> None:
    result, record = run(tmp_path, KEEPS, "1e3")
    assert (result.code, *first_finding(record)) == (1, "forward-overflow", 0, "", "similar = z @ z.T")
    assert_unwatched_saves_the_same(tmp_path, "1e3")
    found = start(tmp_path, "suggest-fp32", captured(record)[0])
    assert (found.code, "the patch for it is proven" in " ".join(found.stderr.split())) == (0, True), found.stderr


@pytest.mark.slow
def test_a_replay_uses_the_data_of_the_captured_step_if_the_model_keeps_data(tmp_path: Path) -> None:
    result, record = run(tmp_path, KEEPS, "1", options=("--emulate", "--capture-step=4"))
    assert (result.code, record.verdict, steps_captured(record)) == (0, "healthy", [4])
    assert_unwatched_saves_the_same(tmp_path, "1")
    replayed = start(tmp_path, "replay", captured(record)[0], "--record=c.json")
    assert replayed.code == 0, replayed.stderr
    again = read_record(tmp_path / "c.json")
    assert again.investigations[0].low.loss == record.steps[4].loss
    assert not any("when captured" in note for note in again.unseen.notes)


@pytest.mark.slow
def test_replay_refuses_a_script_that_passes_data_in_place_of_a_weight(tmp_path: Path) -> None:
    record = run(tmp_path, KEEPS, "1e3")[1]
    script = tmp_path / "train.py"
    script.write_text(script.read_text("utf-8").replace("net.head.weight.to", "torch.ones(4, 16).to"), encoding="utf-8")
    found = start(tmp_path, "replay", captured(record)[0])
    assert (found.code, found.stderr.count("ampdbg.replay")) == (2, 0)
    assert "data takes the place of a tensor of the model's own" in " ".join(found.stderr.split())


IN_MAIN = scripts.loop("""
def counted(x):
    counted.n += 1
    return x * (1 + 0.001 * counted.n)

counted.n = 0

def listed(x, seen=[]):
    seen.append(1)
    return x * (1 + 0.001 * len(seen))

@torch.no_grad()
def factor(seen=[]):
    seen.append(1)
    return 1 + 0.001 * len(seen)

def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda x: x + 0.001 * torch.randn(x.shape, generator=generator)

def main(kind):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).cuda()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cuda", init_scale=1024.0)
    losses, n, mean, noise = [], 0, {}, drawn(1)

    def count(x):
        nonlocal n
        n += 1
        return x * (1 + 0.001 * n)

    class Scaled(nn.Module):
        calls = 0

        def forward(self, x):
            Scaled.calls += 1
            return count(x) * (1 + 0.001 * Scaled.calls)

    def hook(module, inputs, output):
        if kind == "a list":
            losses.append(float(output.detach().mean()))
            return output * (1 + 0.001 * len(losses))
        if kind == "a dict":
            mean["of"] = 0.9 * mean.get("of", 0.0) + 0.1 * output.detach().float().mean()
            return output - mean["of"].to(output.dtype)
        if kind == "a decorated function":
            return output * factor()
        ways = {"a counter": count, "an attribute": counted, "a default": listed, "a generator": noise}
        return ways[kind](output) if kind in ways else output

    def changed(gradient):
        losses.append(1)
        return gradient * (1 + 0.001 * len(losses))

    net[0].register_forward_hook(hook)
    if kind == "a tensor's hook":
        net[0].weight.register_hook(changed)
    if kind == "a hook of an accumulated gradient":
        net[0].weight.register_post_accumulate_grad_hook(lambda one: (one.grad.copy_(changed(one.grad)), None)[1])
    if kind == "a local class":
        net = nn.Sequential(*net, Scaled())
    for step in range(14):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(torch.rand(16, 8).cuda()).float().square().mean()
        STEP
    torch.save(net.state_dict(), "net.pt")

main(sys.argv[1])
""")
IN_CLOSURES = [
    "a list",
    "a dict",
    "a counter",
    "an attribute",
    "a default",
    "a decorated function",
    "a generator",
    "a local class",
    "a tensor's hook",
    "a hook of an accumulated gradient",
]


@pytest.mark.parametrize("kind", slow_except(["a counter", "a generator"], IN_CLOSURES))
def test_replays_restore_what_functions_inside_main_change(kind: str, tmp_path: Path) -> None:
    _, record = run(tmp_path, IN_MAIN, kind)
    assert record.investigations, record.unseen.notes
    assert_unwatched_saves_the_same(tmp_path, kind)
