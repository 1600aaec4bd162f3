"""Steps with a non-finite loss or gradient, also those in which the script exits or raises: replayed and named."""

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import (
    assert_unwatched_saves_the_same,
    captured,
    first_finding,
    run,
    run_with_page,
    steps_captured,
)
from tests.siblings import slow_except

KNOWN_LATE = "that was known only when its weights had been changed"

STOPS = scripts.loop("""
fault, how = sys.argv[1:3]

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.gain = 1.0

    def forward(self, x):
        x = self.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2))
        similar = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(-1, -2)
        if how == "inner":
            assert torch.isfinite(similar).all(), "the scores are wrong"
        return (similar - similar.mean(-1, keepdim=True)).softmax(-1) @ x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.attention(x))

class Criterion(nn.Module):
    gain = 1.0

    def forward(self, outputs, target):
        if how == "criterion":
            assert torch.isfinite(outputs["logits"]).all()
        return {"loss": ((outputs["logits"] * self.gain).float() - target).pow(2).mean()}

def main():
    net, criterion = Net().cuda(), Criterion()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(8):
        is_bad = step == (0 if how in ("first", "behind the first") else 5)
        x, y = torch.randn(4, 6, 16).cuda(), torch.randn(4, 6, 4).cuda()
        if fault == "model":
            net.attention.gain = 600.0 if is_bad or (step > 5 and how == "bare") else 1.0
        if is_bad and fault == "loss":
            criterion.gain = 2.0**18
        if is_bad and fault in ("nan", "inf", "-inf"):
            x[1, 2, 3] = float(fault)
        if is_bad and fault == "weights":
            net.head.weight.data[0, 0] = 1e38
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = net(x)
            if how == "line":
                outputs = outputs + 1.0
            loss = criterion({"logits": outputs}, y)["loss"]
        if is_bad and how == "always":
            raise ValueError("it is time")
        value = loss.item()
        print(step, value)
        is_lost = not math.isfinite(value)
        if is_lost and how not in ("once", "bare") and "behind" not in how:
            if how == "raise":
                raise ValueError("the loss is wrong")
            print("stopping training")
            sys.exit(7)
        optimizer.zero_grad()
        if how == "bare":
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if is_lost and how == "breaks behind":
            break
        if is_lost and how == "writes behind":
            torch.nn.init.zeros_(net.head.bias)
        assert not is_lost or "behind" not in how, "the loss is wrong"
    torch.save(net, "net.pt")
    if how == "evaluates":
        print([net(torch.randn(4, 6, 16).cuda()).shape for _ in range(50)][-1])
    if how in ("evaluates", "ends"):
        sys.exit(3)

main()
""")
"""Fails at step 5; ``fault`` selects the failure and ``how`` the end of the script."""


OVERFLOW = "similar = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(-1, -2)"


ENDS = {"exit": (7, 5), "raise": (1, 5), "inner": (1, 5), "criterion": (1, 5), "first": (7, 0), "line": (7, 5)}
"""The exit code and the failing step of each way to end."""


@pytest.mark.parametrize("how", slow_except(["exit", "inner", "first"], ENDS))
def test_an_overflow_that_ends_a_script_is_named(tmp_path: Path, how: str) -> None:
    code, step = ENDS[how]
    record, page, ended = run_with_page(tmp_path, STOPS, "model", how)
    assert (ended, record.verdict, record.steps_run) == (code, "precision", step + 1)
    assert first_finding(record) == ("forward-overflow", step, "attention", OVERFLOW)
    assert f"the script ended in step {step}; ampdbg replays that step now, also in FP32" in page
    ends = "an error ends the run" if code == 1 else f"the script ends with exit code {code}"
    assert f"The forward pass overflows in attention at step {step}, where {ends}." in page
    assert "no scaler used" not in page  # unknown in a step that ends before its backward pass


def test_an_overflow_of_a_criterion_outside_the_model_is_named(tmp_path: Path) -> None:
    record, _, code = run_with_page(tmp_path, STOPS, "loss", "exit")
    line = 'return {"loss": ((outputs["logits"] * self.gain).float() - target).pow(2).mean()}'
    assert (code, first_finding(record)) == (7, ("forward-overflow", 5, "", line))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "how", "ends", "name"),
    [("nan", "exit", 7, "NaN"), ("inf", "exit", 7, "inf"), ("-inf", "exit", 7, "inf"), ("nan", "once", 1, "NaN")],
)
def test_a_non_finite_batch_is_bad_data_in_run_replay_and_bisect(
    tmp_path: Path, value: str, how: str, ends: int, name: str
) -> None:
    record, page, code = run_with_page(tmp_path, STOPS, value, how)
    assert (code, record.verdict, *first_finding(record)[:2]) == (ends, "other", "data-nonfinite", 5)
    held = f"the batch of step 5 holds 1 {name} among 384 values in argument 1 of Net on line "
    assert (held in page, " of train.py, first in sample 1" in page) == (True, True)
    for command in ("replay", "bisect"):
        start(tmp_path, command, captured(record)[0], "--record=again.json")
        again = read_record(tmp_path / "again.json")
        assert (again.verdict, again.findings[0].code, again.pins) == ("other", "data-nonfinite", ())


@pytest.mark.slow
def test_weights_that_fail_in_fp32_too_are_not_a_precision_fault(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, STOPS, "weights", "exit")
    line = 'return {"loss": ((outputs["logits"] * self.gain).float() - target).pow(2).mean()}'
    assert (code, record.verdict, first_finding(record)) == (7, "other", ("unknown", 5, "", line))
    assert record.findings[0].evidence["finite_in_fp32"] is False
    assert "it is finite in FP64: its values exceed FP32's range, not only FP16's" in page


@pytest.mark.slow
def test_an_error_unrelated_to_precision_is_inconclusive(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, STOPS, "nothing", "always")
    assert (code, record.verdict, record.findings, record.steps_run) == (1, "inconclusive", (), 5)
    assert record.error == (
        "the script raised ValueError: it is time in step 5, after a forward pass without a backward pass; "
        "every module output is finite, and the script's own code after them could not be replayed: "
        "the script ended before its loss"
    )
    assert "! An error stopped the run after 5 steps. Inconclusive" in page


@pytest.mark.slow
def test_a_nonzero_exit_after_an_evaluation_pass_is_inconclusive(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, STOPS, "nothing", "evaluates")
    assert (code, record.verdict, record.findings, record.steps_run) == (3, "inconclusive", (), 8)
    assert "! The script ended early after 8 steps. Inconclusive: none of 8 steps skipped." in page
    assert "the script ended with exit code 3 in step 8, after a forward pass without a backward pass" in page


def test_a_nonzero_exit_after_a_finished_step_is_healthy_and_the_saved_model_is_the_same(tmp_path: Path) -> None:
    record, _, code = run_with_page(tmp_path, STOPS, "nothing", "ends")
    assert (code, record.verdict, record.error) == (3, "healthy", "")
    assert_unwatched_saves_the_same(tmp_path, "nothing", "ends")  # the model is saved as an object


def test_no_investigate_replays_nothing_if_the_script_exits(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, STOPS, "model", "exit", options=("--emulate", "--no-investigate"))
    assert (code, record.verdict, record.findings, record.investigations) == (7, "inconclusive", (), ())
    assert "the script ended with exit code 7 in step 5, after a forward pass without a backward pass" in page
    assert "ampdbg replays that step now" not in page


LOST = {"once": 8, "behind": 6, "breaks behind": 6, "behind the first": 1, "writes behind": 6, "bare": 8}
"""The number of steps of each run: it continues, stops after the failing step, or has no scaler to skip the step."""


@pytest.mark.slow
@pytest.mark.parametrize("how", LOST)
def test_a_step_with_a_non_finite_loss_is_named_captured_and_replayed(tmp_path: Path, how: str) -> None:
    step = 0 if "first" in how else 5
    record, page, code = run_with_page(tmp_path, STOPS, "model", how)
    assert (code, record.verdict, record.steps_run) == (1, "precision", LOST[how])
    assert first_finding(record) == ("forward-overflow", step, "attention", OVERFLOW)
    assert steps_captured(record)[0] == step
    assert len(captured(record)) == 1 or how == "bare"  # with a scaler no other step fails
    assert "was not captured" not in page
    if how == "once":
        assert (record.steps_skipped, [made.step for made in record.investigations]) == (1, [5])
        assert "step 5 is not finite; the script waits while ampdbg replays it, also in FP32" in page
        assert_unwatched_saves_the_same(tmp_path, "model", "once")
    start(tmp_path, "replay", captured(record)[0])
    assert first_finding(read_record(tmp_path / ".ampdbg" / "latest.json")) == first_finding(record)
    bisected = start(tmp_path, "bisect", captured(record)[0])
    assert "1 of 7 modules needs FP32, in its own lines only" in " ".join(bisected.stdout.split())


@pytest.mark.slow
def test_a_requested_capture_does_not_replace_the_capture_of_a_failing_step(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, STOPS, "model", "once", options=("--emulate", "--capture-step=7"))
    assert steps_captured(record) == [5, 7]


@pytest.mark.parametrize(("how", "step"), [("behind the first", 0), ("behind", 5)])
def test_no_investigate_still_captures_a_failing_last_step(tmp_path: Path, how: str, step: int) -> None:
    record, page, _ = run_with_page(tmp_path, STOPS, "model", how, options=("--emulate", "--no-investigate"))
    assert (steps_captured(record), record.investigations) == ([step], ())
    assert f"ampdbg replay .ampdbg/captures/{Path(captured(record)[0]).name}" in page


BESIDE_THE_MODEL = scripts.loop("""
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024)
for step in range(4):
    x = torch.randn(32, 64, device="cuda") * (300 if step == 0 else 1)
    with torch.autocast("cuda"):
        h = net(x)
        loss = torch.softmax(h @ h.t(), -1).square().mean()
    STEP
""")


def test_an_isolated_overflow_outside_its_modules_is_named_by_op_and_line(tmp_path: Path) -> None:
    record = run(tmp_path, BESIDE_THE_MODEL)[1]
    assert first_finding(record) == ("forward-overflow", 0, "", "loss = torch.softmax(h @ h.t(), -1).square().mean()")
    assert (record.findings[0].op, steps_captured(record), record.unseen.notes) == ("aten.mm.default", [0], ())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "inner", "first"])
def test_the_capture_of_a_step_that_ends_the_script_is_replayed_and_patched(tmp_path: Path, how: str) -> None:
    record, _, _ = run_with_page(tmp_path, STOPS, "model", how)
    (capture,) = captured(record)
    replayed = start(tmp_path, "replay", capture)
    assert replayed.code == 1, replayed.stderr
    assert f"step {record.steps[-1].step} fails in 5 of 5 unchanged replays" in replayed.stdout
    assert OVERFLOW in " ".join(replayed.stdout.split())
    has_loss = how != "inner"  # there an assertion of the module fails first
    assert ("was captured without its loss: only its modules were replayed" in replayed.stdout) is not has_loss
    bisected = start(tmp_path, "bisect", capture)
    assert bisected.code == 1, bisected.stderr
    assert "1 of 7 modules needs FP32, in its own lines only" in " ".join(bisected.stdout.split())
    assert "attention:own" in bisected.stdout
    patched = start(tmp_path, "suggest-fp32", "--apply", capture)
    assert patched.code == 0, patched.stderr
    proven_on = "the failing step" if has_loss else "the modules of the failing step, without its loss"
    assert f"the patch for it is proven on {proven_on}" in " ".join(patched.stderr.split())
    proof = read_record(tmp_path / ".ampdbg" / "latest.json").verification
    assert proof is not None
    steps = {step.name: step.detail for step in proof.steps}
    healthy = steps[f"the failing step ({record.steps[-1].step})"].startswith("healthy; loss ")
    is_measured = any(name.endswith("memory of a step") for name in steps)
    assert (healthy, is_measured, "where the loss is NaN" in replayed.stdout) == (has_loss,) * 3
    cured = start(tmp_path, "run", "--emulate", "--no-watch", "train.py", "model", how)
    assert (cured.code, cured.stdout.splitlines()[-1][:2]) == (0, "7 "), cured.stderr


ACCUMULATES = scripts.loop("""
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        large = self.a(x) * 1e6
        return large @ large.transpose(-1, -2) / 1e12

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.head = Scores(), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.scores(x)).float().square().mean()

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
with torch.autocast("cuda", dtype=torch.float16):
    for step in range(3):
        for micro in range(2):
            loss = net(torch.randn(4, 8, 16, device="cuda"))
            if not math.isfinite(loss.item()):
                sys.exit(3)
            with torch.autocast("cuda", enabled=False):
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print("trained", scaler.get_scale())
""")
"""The first pass overflows; with autocast off around the backward pass the gradients are finite."""


@pytest.mark.slow
def test_a_patch_is_proven_outside_the_autocast_region_of_the_script(tmp_path: Path) -> None:
    """With the patch the script continues, and only the next pass, under autocast, shows that the first has ended."""
    record = run(tmp_path, ACCUMULATES, options=("--emulate",))[1]
    (capture,) = captured(record)
    patched = start(tmp_path, "suggest-fp32", "--apply", capture)
    assert patched.code == 0, patched.stderr
    cured = start(tmp_path, "run", "--emulate", "--no-watch", "train.py")
    assert (cured.code, cured.stdout) == (0, "trained 1.0\n"), cured.stderr


IN_FP32 = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.gain = nn.Linear(16, 16), nn.Linear(16, 4), 1.0

    def forward(self, x):
        weights = torch.exp(self.body(x) * self.gain)
        return self.head(weights / weights.sum(-1, keepdim=True))

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    net.gain = 2000.0 if step > 4 else 1.0
    loss = nn.functional.cross_entropy(net(torch.randn(8, 16)), torch.randint(4, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")
"""It trains in FP32 only, and from step 5 on its exponentials overflow."""


@pytest.mark.slow
def test_an_fp32_overflow_is_named_at_the_step_that_makes_the_weights_nan(tmp_path: Path) -> None:
    result, record = run(tmp_path, IN_FP32, options=())
    assert (result.code, record.verdict) == (1, "other")
    assert first_finding(record) == ("true-nan", 5, "", "weights = torch.exp(self.body(x) * self.gain)")


SPOILS = scripts.loop("""
is_bad, is_half = sys.argv[1] == "bad", sys.argv[2] == "half"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.is_bad = nn.Linear(16, 16), nn.Linear(16, 4), False

    def forward(self, x):
        h = self.body(x)
        return self.head(h + (h * 0).sqrt() if self.is_bad else h)

net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(10):
    net.is_bad = is_bad and step == 4
    x, y = torch.randn(8, 16).cuda(), torch.randint(4, (8,)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_half):
        loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")
"""The gradient of the square root of 0 makes the weights NaN, as no scaler skips step 4; its loss is finite."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["half", "float32"])
def test_a_step_that_makes_the_weights_nan_is_named_instead_of_later_steps(tmp_path: Path, precision: str) -> None:
    _, record = run(tmp_path, SPOILS, "bad", precision)
    found = record.findings[0]
    line = "return self.head(h + (h * 0).sqrt() if self.is_bad else h)"
    assert (first_finding(record), found.phase) == (("true-nan", 4, "", line), "backward")
    assert ([made.step for made in record.investigations], steps_captured(record)) == ([4], [4])


def test_a_loop_without_the_nan_gradient_is_healthy(tmp_path: Path) -> None:
    result, record = run(tmp_path, SPOILS, "good", "float32")
    assert (result.code, record.verdict) == (0, "healthy")


WITHHELD = scripts.loop("""
fault, how = sys.argv[1:3]

class Lengths(nn.Module):
    def forward(self, x):
        if fault == "half":
            return (x.half() * x.half()).sum(-1, keepdim=True).sqrt()
        return x.float().pow(2).sum(-1, keepdim=True).sqrt()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lengths, self.head = nn.Embedding(9, 16), Lengths(), nn.Linear(16, 4)
        self.words.weight.data[0] = 0.0

    def forward(self, ids):
        x = self.words(ids)
        return self.head(x / (1.0 + self.lengths(x)))

def main():
    net, criterion = Net().cuda(), nn.MSELoss() if how == "module" else nn.functional.mse_loss
    if fault == "half":
        net.words.weight.data[0] = 1e-8
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(48):
        ids, y = torch.randint(1, 9, (4, 6)).cuda(), torch.randn(4, 6, 4).cuda()
        if step in {"root": (26, 40), "early": (9,), "half": (9,), "first": (0,)}.get(fault, ()):
            ids[2, 3] = 0
        if fault == "half":
            y[...] = 1.0  # its loss falls: no learning rate is behind it
        if step in (26, 40) and fault == "steep":
            y[...] = 60.0 if step == 26 else 120.0
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = net(ids)
            loss = criterion(outputs, y)
            if step == 9 and fault == "beside":
                loss = loss + (outputs * 0.0).float().pow(2).sum().sqrt()
        STEP
    torch.save(net.state_dict(), "net.pt")

main()
""")
"""Every loss is finite. Some gradients are not: of a root of zero, or in FP16 alone. A module or a function makes the
loss."""


ROOT = "return x.float().pow(2).sum(-1, keepdim=True).sqrt()"
HALF = "return (x.half() * x.half()).sum(-1, keepdim=True).sqrt()"
ADDED = "loss = loss + (outputs * 0.0).float().pow(2).sum().sqrt()"
SETTLED = "Healthy: 2 of 48 steps skipped while the loss scale settled at 16,384"
TOLD: dict[tuple[str, str], tuple[str, list[int], str, list[int], str]] = {
    ("root", "module"): ("other", [26, 40], "true-nan", [26, 40], ROOT),
    ("early", "module"): ("other", [9], "true-nan", [9], ROOT),
    ("first", "module"): ("other", [0], "true-nan", [0], ROOT),
    ("early", "function"): ("other", [9], "true-nan", [9], ROOT),
    ("half", "function"): ("precision", [9], "eps-underflow", [9], HALF),
    ("steep", "module"): ("healthy", [26, 40], "scale-calibration", [26, 40], SETTLED),
    ("steep", "function"): ("healthy", [26, 40], "scale-calibration", [26, 40], SETTLED),
    ("beside", "function"): ("other", [9], "true-nan", [9], ADDED),
}
"""The verdict, the skipped steps, the finding, the replayed steps, and the text on the page."""


@pytest.mark.parametrize("of", slow_except([("early", "function")], TOLD), ids="-".join)
def test_a_skipped_step_is_calibration_only_if_its_gradients_are_finite_in_fp32(
    tmp_path: Path, of: tuple[str, str]
) -> None:
    verdict, skipped, code, replayed, says = TOLD[of]
    result, record = run(tmp_path, WITHHELD, *of)
    page = " ".join(result.stderr.split())
    assert [step.step for step in record.steps if step.skipped] == skipped
    assert (result.code, record.verdict, record.findings[0].code) == (int(verdict != "healthy"), verdict, code)
    assert [made.step for made in record.investigations if made.why != "end"] == replayed
    assert says in page
    if verdict == "healthy":
        assert len(record.findings) == 1
    else:
        assert record.findings[0].step == skipped[0]
    assert steps_captured(record) == (replayed if verdict != "healthy" else [])
    assert record.unseen.notes == ()
    assert_unwatched_saves_the_same(tmp_path, *of)
    if verdict != "healthy" and captured(record):
        again = start(tmp_path, "replay", captured(record)[0])
        assert (again.code, code in again.stdout) == (1, True)


BUFFERS = scripts.loop("""
fault = sys.argv[1]

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        mean = x.mean(0)
        if self.training:
            self.mean[:] = self.mean * 0.9 + mean * 0.1
        return x - (mean if self.training else self.mean)

class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(8, 5))
        self.register_buffer("gain", torch.ones(()))
        self.gains = 1.0

    def forward(self, x):
        x = self.body(x) * self.gains
        distances = x @ (self.codes * self.gain)
        with torch.no_grad():
            if fault == "codes":
                self.codes.mul_(0.9).add_(distances.float().mean(0), alpha=0.1)
            elif fault == "data":
                self.codes.data.mul_(0.9).add_(distances.float().mean(0), alpha=0.1)
            elif fault == "gain":
                self.gain = self.gain * 4.0
        return nn.functional.layer_norm(distances, (5,))

def main():
    norm = Norm() if fault == "own norm" else nn.BatchNorm1d(5)
    parts = [nn.Linear(8, 8), Quantizer(), norm, nn.Linear(5, 3)]
    net, criterion = nn.Sequential(*parts).cuda(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for step in range(24):
        if step == {"codes": 20, "data": 20, "statistics": 0, "own norm": 0}.get(fault):
            net[1].gains = 1e5
        x, y = torch.randn(16, 8).cuda(), torch.randint(3, (16,)).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(net(x), y)
        print(step, loss.item(), net[1].gain.item(), flush=True)
        STEP

main()
""")
"""The forward pass itself writes a buffer: with overflowed values, or until the buffer overflows. Its own norm does not
read the buffer in training."""


def buffered(folder: Path, fault: str) -> tuple[Record, list[tuple[str, int, str, str]]]:
    """Returns the record, and the code, step, module and line of each finding."""
    _, record = run(folder, BUFFERS, fault)
    return record, [(one.code, one.step, one.module, one.source.text if one.source else "") for one in record.findings]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["codes", "data"])
def test_a_pass_that_writes_overflowed_values_to_a_buffer_is_replayed_on_the_old_buffer(
    tmp_path: Path, fault: str
) -> None:
    record, found = buffered(tmp_path, fault)
    line = "x = self.body(x) * self.gains"
    assert found[0] == ("forward-overflow", 20, "1", line)
    assert found[1][:2] == ("buffer-poisoned", 20)
    assert "mul in module 1 reaches 136,500 in FP32" in record.findings[0].message
    (capture,) = captured(record)  # later steps begin with NaN and show nothing
    assert steps_captured(record) == [20]
    at = next(number for number, text in enumerate(BUFFERS.splitlines(), start=1) if text.strip() == line)
    for command, code, told in [
        ("replay", 1, line),
        ("bisect", 1, f"mul · train.py:{at}"),
        ("suggest-fp32", 0, f"lines {at} to {at + 1} of train.py"),
    ]:
        done = start(tmp_path, command, capture)
        assert (done.code, told in done.stdout) == (code, True), (command, done.stdout)


@pytest.mark.slow
def test_a_growing_buffer_is_replayed_with_its_value_before_the_step(tmp_path: Path) -> None:
    record, found = buffered(tmp_path, "gain")
    assert found[0] == ("forward-overflow", 8, "1", "distances = x @ (self.codes * self.gain)")
    # 4.0 ** 8 times the largest code; the value after the pass would be four times as large.
    assert "has inputs of up to 133,400" in record.findings[0].message


@pytest.mark.slow
def test_norm_statistics_that_step_0_makes_nan_are_blamed_on_its_overflow(tmp_path: Path) -> None:
    _, found = buffered(tmp_path, "statistics")
    assert [(code, step) for code, step, *_ in found][:2] == [("forward-overflow", 0), ("buffer-poisoned", 0)]
    assert found[0][2:] == ("1", "x = self.body(x) * self.gains")


@pytest.mark.slow
def test_a_non_finite_buffer_that_is_never_read_does_not_prevent_a_capture(tmp_path: Path) -> None:
    record, found = buffered(tmp_path, "own norm")
    line = "x = self.body(x) * self.gains"
    assert found[0] == ("forward-overflow", 0, "1", line)
    for command, code in [("replay", 1), ("suggest-fp32", 0)]:
        done = start(tmp_path, command, captured(record)[0])
        assert (done.code, line in done.stdout) == (code, True), (command, done.stdout)


AVERAGED = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8, 8))

    def forward(self, x):
        out = self.lin(x) - 0.01 * (x @ self.mean)
        with torch.no_grad():
            self.mean.mul_(0.99).add_((x.t() @ x).float() / 1e5, alpha=0.01)
        return out

net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for step in range(12):
    x = torch.randn(64, 8).cuda() * (60 if step == 5 else 1)
    with torch.autocast("cuda", torch.float16):
        loss = net(x).float().tanh().pow(2).mean()
    STEP
""")
"""Step 5 overflows into a buffer, and its loss is finite; step 6 reads the buffer. FP32 is healthy."""


@pytest.mark.slow
def test_a_buffer_made_non_finite_by_an_earlier_step_is_not_divergence(tmp_path: Path) -> None:
    _, record = run(tmp_path, AVERAGED)
    assert [(one.code, one.step) for one in record.findings[:2]] == [("unknown", 6), ("buffer-poisoned", 6)]
    why_not = "its buffer mean held inf or NaN before it, from an earlier step"
    instead = "ampdbg run --capture-step 5 replays the step before it"
    assert f"step 6, whose loss is not finite, could not be replayed: {why_not}; {instead}" in record.unseen.notes
    _, record = run(tmp_path, AVERAGED, options=("--emulate", "--capture-step=5"))
    start(tmp_path, "replay", captured(record)[0], "--record=again.json")
    found = read_record(tmp_path / "again.json").findings[0]
    assert (found.code, found.step, found.op) == ("silent-overflow", 5, "aten.mm.default")


def test_a_script_with_finite_buffers_is_healthy(tmp_path: Path) -> None:
    record, found = buffered(tmp_path, "none")
    assert (record.verdict, found) == ("healthy", [])
    assert [made.why for made in record.investigations] == ["end"]  # the step that is compared with FP32


IGNORED = scripts.loop("""
fault, how = sys.argv[1:3]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.dropout = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.head, self.gain = nn.Linear(16, 4), 1.0

    def forward(self, x, y=None):
        out = self.head(self.dropout(self.norm(self.body(x))))
        if y is None:
            return out
        beside = (out * self.gain).float().mean() * 1e-6
        return nn.functional.cross_entropy(out, y) + beside

def main():
    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=how == "fused")
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    if how == "recorded":  # as torch.cuda.make_graphed_callables leaves it
        eager = net.forward
        net.forward = lambda *given: eager(*given)
        net.forward.__module__ = "torch.cuda.graphs"

    def loss_of(x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16 if how == "closure" else torch.float16):
            if how == "no module":
                return nn.functional.cross_entropy(nn.functional.linear(x, net.head.weight), y)
            return nn.functional.cross_entropy(net(x), y) if how == "function" else net(x, y)

    def closure():
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        return loss

    for step in range(12):
        is_bad = step in (3, 8)
        x, y = torch.randn(8, 16).cuda(), torch.randint(4, (8,)).cuda()
        if is_bad and fault == "targets":
            y[:] = -100
        net.gain = 2.0**17 if is_bad and fault == "overflow" else 1.0
        if how == "closure":
            optimizer.step(closure)
            continue
        loss = loss_of(x, y)
        optimizer.zero_grad()
        if how == "twice":
            scaler.scale(loss / 2).backward(retain_graph=True)
            loss = loss / 2
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save(net.state_dict(), "net.pt")

main()
""")
"""The losses of steps 3 and 8 are not finite, but their gradients are: no scaler skips the steps."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "fused"])
def test_an_isolated_non_finite_loss_without_a_skip_is_named_and_captured(tmp_path: Path, how: str) -> None:
    result, record = run(tmp_path, IGNORED, "targets", how)
    if how == "fused" and not record.environment.emulated:  # the scaler does not wait for its numbers on a GPU
        assert any(KNOWN_LATE in note for note in record.unseen.notes)
        return
    assert (result.code, record.verdict, record.steps_skipped, record.unseen.notes) == (1, "other", 0, ())
    assert first_finding(record) == ("true-nan", 3, "", "return nn.functional.cross_entropy(out, y) + beside")
    assert [made.step for made in record.investigations] == [3, 8]
    told = " ".join(result.stderr.split())
    assert "leave out batches in which every target is ignored (ignore_index): a mean over none is 0/0" in told
    assert steps_captured(record) == [3, 8]
    replayed = start(tmp_path, "replay", captured(record)[0])
    assert (replayed.code, "true-nan · step 3" in replayed.stdout) == (1, True)
    assert_unwatched_saves_the_same(tmp_path, "targets", how)


@pytest.mark.slow
def test_an_isolated_overflow_without_a_skip_is_a_precision_fault(tmp_path: Path) -> None:
    result, record = run(tmp_path, IGNORED, "overflow", "module")
    assert (result.code, record.verdict, record.steps_skipped) == (1, "precision", 0)
    assert first_finding(record) == ("forward-overflow", 3, "", "beside = (out * self.gain).float().mean() * 1e-6")


@pytest.mark.slow
def test_a_failing_step_that_cannot_be_replayed_has_a_note_that_says_why(tmp_path: Path) -> None:
    result, record = run(tmp_path, IGNORED, "targets", "recorded")
    assert (result.code, record.findings[0].code, record.findings[0].step) == (1, "unknown", 3)
    why = "it runs a recorded CUDA graph, which runs in no other precision"
    assert record.unseen.notes[0] == f"step 3, whose loss is not finite, could not be replayed: {why}"
    silent = run(tmp_path, IGNORED, "targets", "recorded", options=("--emulate", "--no-investigate"))[1]
    assert not any("could not be replayed" in note for note in silent.unseen.notes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["function", "twice", "closure", "no module"])
def test_an_isolated_non_finite_loss_of_a_function_or_closure_is_captured(tmp_path: Path, how: str) -> None:
    result, record = run(tmp_path, IGNORED, "targets", how)
    assert (result.code, record.findings[0].code, record.findings[0].step) == (1, "true-nan", 3)
    assert [(made.step, made.reach) for made in record.investigations] == [(3, "whole"), (8, "whole")]
    assert (steps_captured(record), record.unseen.notes) == ([3, 8], ())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "function", "twice", "closure"])
def test_a_run_without_non_finite_losses_is_healthy_and_notes_no_failing_step(tmp_path: Path, how: str) -> None:
    result, record = run(tmp_path, IGNORED, "nothing", how)
    assert (result.code, record.verdict, record.findings) == (0, "healthy", ())
    assert {made.why for made in record.investigations} <= {"end"}
    assert not any("not finite" in note for note in record.unseen.notes)


AUTOCAST_INSIDE = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        with torch.autocast("cuda"):
            h = self.a(x) * float(sys.argv[1])
            h = h * h
            return self.b(h / (1 + h.amax(-1, keepdim=True))).float()

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for _ in range(3):
    out = net(torch.randn(8, 16).cuda())
    assert not torch.isnan(out).any()
    loss = out.abs().mean()
    STEP
""")


@pytest.mark.parametrize("gain", ["400", "1"])
def test_an_assert_in_the_first_step_is_explained_if_autocast_is_inside_the_model(tmp_path: Path, gain: str) -> None:
    result, record = run(tmp_path, AUTOCAST_INSIDE, gain)
    if gain == "1":
        assert (result.code, record.verdict) == (0, "healthy")
    else:
        assert (result.code, record.verdict) == (1, "precision")
        assert first_finding(record) == ("forward-overflow", 0, "", "h = h * h")
