"""One step of a loop that looks healthy is compared with FP32: hidden faults are found, and the run is unchanged."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import assert_unwatched_saves_the_same, run, steps_captured
from tests.siblings import slow_except

HIDDEN = scripts.loop("""
class Norm(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

net = nn.Sequential(nn.Linear(32, 16), Norm(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)).cuda()
optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(80):
    x, y = float(sys.argv[1]) * torch.rand(8, 32).cuda(), torch.randint(0, 4, (8,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y) * (1e8 if step == 10 and sys.argv[2:] else 1.0)
    STEP
torch.save([net.state_dict(), optimizer.state_dict(), scaler.state_dict(), net[1].calls, torch.rand(3)], "net.pt")
""")
"""At 1,000 the squares overflow, but rsqrt turns each inf into zero: no loss or gradient shows the overflow."""


CONVERGED = scripts.loop("""
net = nn.Linear(10, 10, bias=False).cuda()
nn.init.eye_(net.weight).data.mul_(11.5)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cuda", enabled=DTYPE is torch.float16)
for step in range(20):
    y = torch.randint(10, (64,)).cuda()
    x = F.one_hot(y, 10) + 0.02 * torch.randn(64, 10).cuda()
    with torch.autocast("cuda", dtype=DTYPE):
        out = net(x)
        loss = LOSS
    STEP
""")
"""The loss is 1e-4: a half logarithm of the sum would make it zero, and its gradient too."""


@pytest.mark.parametrize("dtype", slow_except(["float16"], ["float16", "bfloat16"]))
def test_cross_entropy_of_a_converged_net_is_healthy(tmp_path: Path, dtype: str) -> None:
    text = CONVERGED.replace("LOSS", "F.cross_entropy(out, y)").replace("DTYPE", f"torch.{dtype}")
    result, record = run(tmp_path, text)
    assert (result.code, record.verdict) == (0, "healthy")
    assert record.steps[0].loss == pytest.approx(1e-4, rel=0.2)


@pytest.mark.slow
def test_cross_entropy_whose_gradient_is_rounded_by_the_script_is_not_healthy(tmp_path: Path) -> None:
    rounded = "-F.one_hot(y, 10).mul(out - out.detach()).mean() + (out.softmax(-1).to(DTYPE).detach() * out).mean()"
    result, record = run(tmp_path, CONVERGED.replace("LOSS", rounded).replace("DTYPE", "torch.float16"))
    assert (result.code, record.verdict) == (1, "precision")


@pytest.mark.parametrize(
    ("factor", "found"), [("1000", ["silent-overflow"]), pytest.param("1", [], marks=pytest.mark.slow)]
)
def test_a_hidden_overflow_is_found_and_captured_after_ten_taken_steps(
    tmp_path: Path, factor: str, found: list[str]
) -> None:
    result, record = run(tmp_path, HIDDEN, factor)
    (made,) = record.investigations
    assert made.why == "end"
    assert made.step >= 10  # later on a slow machine, where replays get only a share of the run's time
    assert [(one.code, one.step, one.module, one.op) for one in record.findings[:1]] == [
        (code, made.step, "1", "aten.mul.Tensor") for code in found
    ]
    assert (result.code, steps_captured(record)) == (len(found), [made.step] * len(found))
    assert ("suggest-fp32" in result.stderr) == bool(found)
    assert_unwatched_saves_the_same(tmp_path, factor)


IN_A_CLOSURE = scripts.loop("""
net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
optimizer = (torch.optim.LBFGS if "LBFGS" in sys.argv else torch.optim.AdamW)(net.parameters(), lr=1e-3)
for step in range(14):
    x, y = torch.randn(8, 16).cuda(), torch.randint(0, 4, (8,)).cuda()

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            z = net(x)
            loss = nn.functional.cross_entropy(z, y)
            if step == 12 and "root" in sys.argv:
                loss = loss + (z - z.detach()).square().sum().sqrt()
        loss.backward()
        return loss

    optimizer.step(closure)
torch.save([net.state_dict(), torch.rand(3)], "net.pt")
""")
"""As in Lightning, but without a GradScaler: the gradients are computed inside the optimizer's step."""


@pytest.mark.parametrize("optimizer", slow_except(["LBFGS"], ["AdamW", "LBFGS"]))
def test_a_step_with_a_closure_is_compared_with_fp32(optimizer: str, tmp_path: Path) -> None:
    result, record = run(tmp_path, IN_A_CLOSURE, optimizer)
    assert [(made.why, made.step) for made in record.investigations] == [("end", 10)]
    assert (record.findings, record.unseen.notes) == ((), ())
    assert "step 10 agrees with FP32" in " ".join(result.stderr.split())
    assert_unwatched_saves_the_same(tmp_path, optimizer)


def test_non_finite_gradients_of_a_closure_are_named_and_captured_at_their_step(tmp_path: Path) -> None:
    _, record = run(tmp_path, IN_A_CLOSURE, "AdamW", "root")
    found = record.findings[0]
    assert (found.code, found.step, found.phase) == ("true-nan", 12, "backward")
    assert found.source is not None
    assert found.source.text == "loss = loss + (z - z.detach()).square().sum().sqrt()"
    assert steps_captured(record) == [12]
    assert_unwatched_saves_the_same(tmp_path, "AdamW", "root")


def test_no_investigate_compares_no_step_with_fp32_and_a_note_says_so(tmp_path: Path) -> None:
    result, record = run(tmp_path, HIDDEN, "1000", options=("--emulate", "--no-investigate"))
    assert (result.code, record.investigations) == (0, ())
    said = "step 10 was not compared with FP32: --no-investigate allows no replay"
    assert record.unseen.notes == (said,)
    page = " ".join(result.stderr.split())
    assert "? No fault found: none of 80 steps skipped; no step was compared with FP32." in page
    step = (
        "Next: capture a step, which ampdbg replay compares with FP32 ampdbg run --emulate --capture-step 10 train.py"
    )
    assert step in page


@pytest.mark.parametrize(("steps", "is_compared"), [("10", False), ("11", True)])
def test_a_run_too_short_for_a_comparison_says_how_many_steps_are_needed(
    tmp_path: Path, steps: str, is_compared: bool
) -> None:
    result, record = run(tmp_path, HIDDEN.replace("range(80)", f"range({steps})"), "1")
    page = " ".join(result.stderr.split())
    assert ("a comparison with FP32 takes over 10 healthy steps in a row" in page) != is_compared
    assert ("? No fault found: none of 10 steps skipped; no step was compared with FP32." in page) != is_compared
    assert ("--capture-step 9" in page) != is_compared
    assert ("✓ Healthy: none of 11 steps skipped." in page) == is_compared
    assert [made.step for made in record.investigations] == [10] * is_compared


@pytest.mark.slow
def test_a_step_whose_replays_take_too_long_is_not_compared_and_the_run_says_so(tmp_path: Path) -> None:
    slow = HIDDEN.replace("    optimizer.zero_grad()", "    time.sleep(1.6)\n    optimizer.zero_grad()", 1)
    result, record = run(tmp_path, slow.replace("range(80)", "range(12)"), "1")
    assert record.investigations == ()
    assert "No fault found: none of 12 steps skipped; no step was compared" in " ".join(result.stderr.split())
    assert "\n  ampdbg run --emulate --capture-step 10 train.py 1\n" in result.stderr
    (said,) = record.unseen.notes
    assert said == ("step 10 was not compared with FP32: its replays take more of the run's time than ampdbg uses")


def test_the_comparison_moves_to_a_later_step_if_its_step_is_skipped(tmp_path: Path) -> None:
    _, record = run(tmp_path, HIDDEN, "1", "withheld")
    assert [step.step for step in record.steps if step.skipped] == [10]
    assert not [note for note in record.unseen.notes if "compared with FP32" in note]
    (compared,) = [made.step for made in record.investigations if made.why == "end"]
    assert compared > 20  # ten steps in a row must be taken again
    assert_unwatched_saves_the_same(tmp_path, "1", "withheld")


STATIC = scripts.loop("""
net, batch = nn.Linear(8, 1).cuda(), torch.empty(16, 8).cuda()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(20):
    batch.copy_(torch.rand(16, 8))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (net(batch).float() - batch.cpu().cuda().sum(1, keepdim=True)).square().mean()
    batch.zero_()
    STEP
torch.save([net.state_dict(), optimizer.state_dict(), scaler.state_dict(), torch.rand(3)], "net.pt")
""")
"""One tensor holds every batch and is cleared before the backward pass."""


def test_a_step_whose_batch_the_script_overwrites_is_compared_on_the_original_batch(tmp_path: Path) -> None:
    _, record = run(tmp_path, STATIC)
    assert [(made.step, made.reproduced) for made in record.investigations] == [(10, True)]
    assert not record.unseen.notes
    assert_unwatched_saves_the_same(tmp_path)


FP16_WEIGHTS = scripts.loop("""
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).cuda().half()
optimizer = torch.optim.SGD(net.parameters(), lr=6e4)
for step in range(14):
    x = torch.randn(32, 16).cuda().half()
    loss = (net(x) - x[:, :1]).float().square().mean() * 1e-7
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")


def test_the_remedy_for_fp16_weights_is_float32_weights_with_autocast_and_a_scaler(tmp_path: Path) -> None:
    _, record = run(tmp_path, FP16_WEIGHTS)
    (found,) = (one for one in record.findings if one.code == "gradient-underflow")
    assert found.remedy.startswith("keep the weights in float32 and run the model under autocast with a GradScaler")


SEVERAL_OPTIMIZERS = scripts.loop("""
net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 32, bias=False)).cuda()
net[3].weight = nn.Parameter(torch.randn(32, 16))
if "tied" in sys.argv:
    net[3].weight = net[0].weight
optimizers = {one: torch.optim.AdamW([one], lr=1e-3) for one in net.parameters()}

def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

if "within" in sys.argv:
    for one in optimizers:
        one.register_post_accumulate_grad_hook(step)
for _ in range(16):
    ids = torch.randint(0, 32, (64,)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(ids), (3 * ids + 1) % 32)
    loss.backward()
    if "within" not in sys.argv:
        for one in optimizers:
            step(one)
torch.save([net.state_dict(), torch.rand(3)], "net.pt")
""")


@pytest.mark.parametrize("weights", slow_except(["tied"], ["", "tied"]))
def test_a_step_within_the_backward_pass_is_not_compared_and_a_note_says_why(weights: str, tmp_path: Path) -> None:
    result, record = run(tmp_path, SEVERAL_OPTIMIZERS, "within", weights)
    assert (result.code, record.error, record.investigations) == (0, "", ())
    why = "its optimizer steps within the backward pass, which a replay would disturb"
    assert record.unseen.notes == (f"step 10 was not compared with FP32: {why}",)
    assert_unwatched_saves_the_same(tmp_path, "within", weights)


def test_a_step_of_several_optimizers_is_compared_once_without_a_note(tmp_path: Path) -> None:
    _, record = run(tmp_path, SEVERAL_OPTIMIZERS)
    assert [made.step for made in record.investigations] == [10]
    assert record.unseen.notes == ()


BY_A_GRAPH_FROM_BEFORE = HIDDEN.replace(
    "class Norm", "before = torch.ones((), requires_grad=True).clone()\n\nclass Norm"
).replace("    optimizer.zero_grad()\n", "    loss = loss * before.to(loss.device)\n    optimizer.zero_grad()\n")


def test_a_loss_with_a_graph_from_before_the_loop_is_not_compared_and_has_a_note(tmp_path: Path) -> None:
    result, record = run(tmp_path, BY_A_GRAPH_FROM_BEFORE, "1")
    assert record.investigations == ()
    assert "agrees with FP32" not in result.stderr
    assert record.unseen.notes[-1].endswith("ampdbg did not see every call that its loss needs")


RAISES_IN_FP32 = scripts.loop("""
class Large(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.dtype is torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return y

net = nn.Sequential(Large(8, 8), nn.Linear(8, 1)).cuda()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(16):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(torch.rand(16, 8).cuda()).float().square().mean()
    STEP
torch.save(net.state_dict(), "net.pt")
""")
"""FP32 takes more memory than there is."""


def test_a_replay_in_fp32_that_runs_out_of_memory_is_named_as_the_reason(tmp_path: Path) -> None:
    result, record = run(tmp_path, RAISES_IN_FP32)
    (note,) = record.unseen.notes
    assert (result.code, record.verdict) == (0, "healthy")
    assert note.startswith("step 10 was not compared with FP32: its replay in FP32 failed: ")
    assert "OutOfMemoryError: CUDA out of memory" in note
    assert_unwatched_saves_the_same(tmp_path)


UNSCALED = scripts.loop("""
net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", enabled=False)
for step in range(12):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(torch.randn(8, 16).cuda()), torch.randint(4, (8,)).cuda()) * float(sys.argv[1])
    STEP
""")


@pytest.mark.parametrize(("factor", "found"), [("1e-7", ["gradient-underflow"]), ("1", [])])
def test_fp16_with_a_disabled_scaler_is_a_fault_only_where_it_flushes_gradients(
    factor: str, found: list[str], tmp_path: Path
) -> None:
    _, record = run(tmp_path, UNSCALED, factor)
    assert [one.code for one in record.findings] == found
