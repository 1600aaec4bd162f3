"""Steps that the script itself skips: it checks its loss or gradients and continues with the next batch."""

from pathlib import Path

import pytest

from tests.commands.program import start
from tests.script import scripts
from tests.script.test_captures import run_on_capture
from tests.script.test_run import (
    alone,
    assert_unwatched_saves_the_same,
    captured,
    first_finding,
    run,
    run_with_page,
    steps_captured,
)
from tests.siblings import slow_except

GIVES_UP = scripts.loop("""
fault, how = sys.argv[1:3]

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        similar = self.q(x) @ self.k(x).transpose(-1, -2)
        return (similar - similar.mean(-1, keepdim=True)).softmax(-1) @ torch.tanh(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(16, 4)

    def forward(self, x, y=None):
        out = self.head(self.attention(x))
        return out if y is None else (out.float() - y).pow(2).mean()

net, criterion = Net().cuda(), nn.MSELoss()
trained = list(net.parameters())
if how in ("copies", "wrapped"):  # half weights, and copies in FP32 that are trained; DistributedDataParallel around
    net.half()
    trained = [nn.Parameter(parameter.detach().float()) for parameter in trained]
if how == "wrapped":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(trained, lr=1e-3)
scaler, scale = torch.amp.GradScaler("cuda"), 2.0**10
for step in range(10):
    x, y = torch.randn(4, 6, 16).cuda(), torch.randn(4, 6, 4).cuda()
    is_bad = fault == "always" or step in (5, 7)
    x *= 600.0 if is_bad and fault != "data" and fault != "nothing" else 1.0
    if is_bad and fault == "data":
        x[1, 2, 3] = float("nan")
    if how == "evaluates":
        net.eval()
        checked = [net(x * float("nan"), y) for _ in range(2)]
        net.train()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x, y) if how != "criterion" else criterion(net(x).float(), y)
        if how == "twice":
            loss = loss + (net(x) - net(x * 0.9)).float().pow(2).mean()
        if how == "views":
            loss = loss + net(x * 0.9, y)
    optimizer.zero_grad()
    if how in ("loss", "criterion") and not torch.isfinite(loss):
        continue
    if how in ("by hand", "copies", "wrapped"):
        (loss * scale).backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        if not all(torch.isfinite(gradient).all() for gradient in gradients):
            scale /= 2
            continue
        for weight, gradient in zip(trained, gradients):
            weight.grad = gradient.float() / scale
        optimizer.step()
        for weight, parameter in zip(trained, net.parameters()):
            parameter.data.copy_(weight.data)
            parameter.grad = None
        continue
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save(net.state_dict(), "net.pt")
""")

OVERFLOW = "similar = self.q(x) @ self.k(x).transpose(-1, -2)"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loss", "criterion", "by hand", "copies"])
def test_a_step_that_the_script_skips_is_named_captured_and_patched(tmp_path: Path, how: str) -> None:
    record, _, code = run_with_page(tmp_path, GIVES_UP, "model", how)
    assert (code, record.verdict) == (1, "precision")
    assert first_finding(record) == ("forward-overflow", 5, "attention", OVERFLOW)
    assert steps_captured(record)[0] == 5
    patched = start(tmp_path, "suggest-fp32", captured(record)[0])
    assert patched.code == 0, patched.stderr
    assert "the patch for it is proven on the failing step" in " ".join(patched.stderr.split())
    assert_unwatched_saves_the_same(tmp_path, "model", how)


@pytest.mark.slow
def test_half_weights_with_ddp_hooks_are_investigated_only_by_ampdbg_replay(tmp_path: Path) -> None:
    result, record = run(tmp_path, GIVES_UP, "always", "wrapped")
    assert (result.code, record.investigations, record.steps_skipped) == (1, (), 10)
    page = " ".join(result.stderr.split())
    assert "also in FP32 ampdbg replay .ampdbg/captures/" in page
    (note,) = [note for note in record.unseen.notes if "could not be replayed" in note]
    assert note.startswith(
        "step 0, whose loss is not finite, could not be replayed: a wrapper such as DDP hooks its half weights"
    )
    replayed = start(tmp_path, "replay", captured(record)[0])
    assert "step 0 fails in 5 of 5 unchanged replays" in replayed.stdout, replayed.stderr
    assert OVERFLOW in " ".join(replayed.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loss", "copies", "criterion", "by hand"])
def test_a_run_whose_script_skips_every_step_names_the_overflow_at_step_0(tmp_path: Path, how: str) -> None:
    record, page, code = run_with_page(tmp_path, GIVES_UP, "always", how)
    assert (code, record.verdict, record.findings[0].code) == (1, "precision", "forward-overflow")
    assert (record.findings[0].step, record.steps_run, record.steps_skipped) == (0, 10, 10)
    assert "although the loss was" not in page
    replayed = start(tmp_path, "replay", captured(record)[0])
    assert "step 0 fails in 5 of 5 unchanged replays" in replayed.stdout, replayed.stderr


@pytest.mark.parametrize("how", slow_except(["by hand"], ["loss", "by hand", "criterion"]))
def test_a_nan_batch_that_the_script_skips_is_bad_data(tmp_path: Path, how: str) -> None:
    record, _, code = run_with_page(tmp_path, GIVES_UP, "data", how)
    assert (code, record.verdict) == (1, "other")
    assert (record.findings[0].code, record.findings[0].step) == ("data-nonfinite", 5)
    if how == "criterion":
        assert_unwatched_saves_the_same(tmp_path, "data", how)


def test_a_step_whose_first_view_fails_goes_backward_as_without_ampdbg(tmp_path: Path) -> None:
    record, _, code = run_with_page(tmp_path, GIVES_UP, "model", "views")
    assert (code, record.verdict, record.error, record.steps_run) == (1, "precision", "", 10)
    assert first_finding(record) == ("forward-overflow", 5, "attention", OVERFLOW)
    assert_unwatched_saves_the_same(tmp_path, "model", "views")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loss", "criterion", "by hand", "wrapped", "twice", "evaluates"])
def test_evaluation_passes_and_repeated_model_calls_are_not_skipped_steps(tmp_path: Path, how: str) -> None:
    record, _, code = run_with_page(tmp_path, GIVES_UP, "nothing", how)
    assert (code, record.verdict, record.steps_run, record.findings) == (0, "healthy", 10, ())


@pytest.mark.slow
def test_weights_wrapped_by_ddp_are_the_same_as_unwatched_if_the_script_skips_steps(tmp_path: Path) -> None:
    run_with_page(tmp_path, GIVES_UP, "model", "wrapped")
    assert_unwatched_saves_the_same(tmp_path, "model", "wrapped")


BESIDE = scripts.loop("""
judge, net = nn.Linear(4, 1).cuda(), nn.Linear(4, 1).cuda()
checked = judge(torch.full((1, 4), float("nan")).cuda())  # a pass of another that nothing follows
again = judge(torch.ones(1, 4).cuda())
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda")
for _ in range(4):
    with torch.autocast("cuda", dtype=torch.float16):
        out = judge(net(torch.ones(2, 4).cuda()).expand(-1, 4)) - judge(torch.ones(2, 4).cuda())
        loss = out.float().pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
""")


def test_a_module_that_is_not_trained_is_not_taken_for_the_model(tmp_path: Path) -> None:
    _, record = run(tmp_path, BESIDE)
    names = {one.name for step in record.steps for group in step.groups for one in group.parameters}
    assert names == {"weight", "bias"}


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
        loss = criterion(net(real), target) if way != "difference" else 0
        if way == "given up" and not torch.isfinite(loss):
            continue
        if way == "heads":
            loss = loss + criterion(loss.detach() * 0 + loss, torch.zeros(()))
        if way == "critic":
            loss = loss + criterion(net(fake), target.nan_to_num())
        if way == "difference":
            loss = criterion(net(real), target) - net(fake).mean()
            loss = loss + net(fake * 0.5).square().mean()
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
"""``way`` selects how the loss is made; the target is NaN in the steps ``bad``."""


@pytest.mark.parametrize("way", slow_except(["difference"], ["heads", "critic", "difference", "penalty"]))
@pytest.mark.parametrize("bad", slow_except([("3", "4", "7")], [("3",), ("3", "4", "7")]))
def test_a_loss_of_several_parts_counts_as_one_step(way: str, bad: tuple[str, ...], tmp_path: Path) -> None:
    result, record = run(tmp_path, PARTS, way, *bad, options=())
    assert (record.steps_run, record.steps_skipped) == (8, len(bad))
    assert result.stdout == alone(tmp_path, "train.py", way, *bad)


@pytest.mark.parametrize("bad", slow_except([("3",)], [("3",), ("3", "4", "7")]))
def test_each_loss_that_the_script_skips_counts_as_a_skipped_step(bad: tuple[str, ...], tmp_path: Path) -> None:
    result, record = run(tmp_path, PARTS, "given up", *bad, options=())
    assert (record.steps_run, record.steps_skipped) == (8, len(bad))
    assert [step.step for step in record.steps if step.skipped] == [*map(int, bad)]
    assert result.stdout.startswith(f"{8 - len(bad)} ")
    assert result.stdout == start(tmp_path, "run", "--no-watch", "train.py", "given up", *bad).stdout


OWN_SCALER = scripts.loop("""
power, falls, grows, masters, bad = float(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:6]

class Criterion(nn.Module):
    def forward(self, net, x, y):
        out = net(x).float()
        return out, nn.functional.mse_loss(out, y)

net, criterion = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda(), Criterion()
weights = list(net.parameters())
if masters == "flat":
    net.half()
    stepped = [torch._utils._flatten_dense_tensors([weight.detach().float() for weight in weights])]
elif masters in ("model", "moved"):
    stepped = list(copy.deepcopy(net).parameters())
    net.half()
else:
    stepped = weights
optimizer = torch.optim.SGD(stepped, lr=1e-3)
skipped, losses = 0, []
for step in range(24):
    x, y = torch.randn(8, 16).cuda(), torch.randn(8, 4).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        out, loss = criterion(net, x, y) if masters == "flat" else criterion.forward(net, x, y)
        if bad == "root" and step >= 12:
            loss = loss + ((out - out).square().sum() + out.sum() * 0).sqrt()
    for weight in weights:
        weight.grad = None
    losses.append(loss.item())
    if masters == "none":
        (loss * 2.0**power).backward()
    else:
        loss *= 2.0**power
        loss.backward()
    if masters == "moved":
        for master, weight in zip(stepped, weights):
            master.grad = weight.grad.float()
    if not all(weight.grad.isfinite().all() for weight in weights):
        power, skipped = power - falls, skipped + 1
        continue
    gradients = [weight.grad.float() / 2.0**power for weight in weights]
    if masters == "flat":
        gradients = [torch._utils._flatten_dense_tensors(gradients)]
    for master, gradient in zip(stepped, gradients):
        master.grad = gradient
    optimizer.step()
    if masters == "flat":
        copies = torch._utils._unflatten_dense_tensors(stepped[0].detach(), weights)
    else:
        copies = [master.detach() for master in stepped]
    for weight, master in zip(weights, copies):
        weight.data.copy_(master)
    power += grows
print(skipped, min(losses), max(losses))
""")
"""The script has its own loss scale; weights are float32 under autocast, or half with float32 masters.

Gradients that are "moved" are those of the masters when the script checks them, and stay after a skipped step."""

MASTERS = ("none", "flat", "model", "moved")


@pytest.mark.parametrize("masters", slow_except(["flat", "moved"], MASTERS))
def test_skips_while_the_scripts_own_loss_scale_settles_are_calibration(tmp_path: Path, masters: str) -> None:
    result, record = run(tmp_path, OWN_SCALER, "22", "1", "0.001", masters, "")
    skipped, least, most = map(float, result.stdout.split())
    assert (record.steps_run, record.steps_skipped, record.verdict) == (24, skipped, "healthy")
    assert skipped >= 2
    losses = [step.loss for step in record.steps]
    assert (min(losses), max(losses)) == pytest.approx((least, most), rel=1e-3)
    assert [step.scale for step in record.steps[:3]] == [2.0**22, 2.0**21, 2.0**20]
    (found,) = record.findings
    assert (found.code, found.severity) == ("scale-calibration", "info")
    assert found.message.startswith(f"the script itself skipped {skipped:.0f} steps while the loss scale settled at ")
    assert "agrees with FP32" in " ".join(result.stderr.split())


@pytest.mark.parametrize("masters", slow_except(["model"], MASTERS))
def test_a_nan_that_collapses_the_scripts_own_loss_scale_is_named_by_line(tmp_path: Path, masters: str) -> None:
    record, _, code = run_with_page(tmp_path, OWN_SCALER, "10", "1", "0", masters, "root")
    assert (code, record.verdict, record.steps_skipped) == (1, "other", 12)
    root, collapse = record.findings
    assert (root.code, root.step, collapse.code) == ("true-nan", 12, "scale-collapse")
    assert root.source is not None
    assert root.source.text.startswith("loss = loss + ((out - out)")
    assert collapse.message == "the loss scale keeps falling, from 1,024 to 0.5"


def test_growing_the_scripts_own_loss_scale_too_often_is_an_oscillation(tmp_path: Path) -> None:
    grown, _, _ = run_with_page(tmp_path, OWN_SCALER, "14", "1", "1", "none", "")
    assert [(found.code, found.severity) for found in grown.findings] == [("scale-oscillation", "warning")]


@pytest.mark.slow
def test_a_fixed_loss_scale_of_the_script_is_an_error_only_if_too_large(tmp_path: Path) -> None:
    never, _, _ = run_with_page(tmp_path, OWN_SCALER, "26", "0", "0", "none", "")
    assert (never.findings[0].code, never.findings[0].severity) == ("scale-calibration", "error")
    sound, _, _ = run_with_page(tmp_path, OWN_SCALER, "6", "0", "0", "none", "")
    assert (sound.verdict, sound.steps_skipped, sound.findings) == ("healthy", 0, ())


WEIGHED = scripts.loop("""
net = nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(16):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(torch.randn(16, 8).cuda()).float().square().mean()
        if step == 13:
            loss = loss + (loss - loss) ** 0.5
    optimizer.zero_grad()
    (loss * 100).backward()
    if all(parameter.grad.isfinite().all() for parameter in net.parameters()):
        optimizer.step()
""")


def test_a_loss_weight_is_not_a_loss_scale_and_its_skipped_step_is_named(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, WEIGHED)
    assert first_finding(record)[::3] == ("true-nan", "loss = loss + (loss - loss) ** 0.5")
    assert {step.scale for step in record.steps} == {1.0}
    assert [step.step for step in record.steps if step.skipped] == [13]


HALF_ALONE = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        h = torch.relu(self.into(x))
        h = (h * 400) * (h * 400)
        return self.out(h / 160_000)

net = Net().half().cuda()
masters = [weight.detach().float() for weight in net.parameters()]
optimizer = torch.optim.SGD(masters, lr=1e-3)
for step in range(3):
    loss = nn.functional.mse_loss(net(torch.randn(8, 16).half().cuda()).float(), torch.randn(8, 4).cuda())
    net.zero_grad()
    (loss * 128).backward()
    for master, weight in zip(masters, net.parameters()):
        master.grad = weight.grad.float() / 128
    optimizer.step()
    for weight, master in zip(net.parameters(), masters):
        weight.data.copy_(master)
""")


def test_suggest_fp32_writes_no_patch_for_half_weights_outside_autocast(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, HALF_ALONE)
    assert first_finding(record)[::3] == ("forward-overflow", "h = (h * 400) * (h * 400)")
    result, suggested = run_on_capture(tmp_path, "suggest-fp32", Path(captured(record)[0]))
    assert [pin.name for pin in suggested.pins] == [":own"]
    assert suggested.handover is not None
    assert (suggested.handover.files, suggested.verification) == ((), None)
    assert "its step runs outside of autocast, which patches rely on" in " ".join(result.stderr.split())


ENDS_AFTER_BACKWARD = scripts.loop("""
how = sys.argv[1]
net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(6):
    x, y = torch.randn(8, 16).cuda(), torch.randn(8, 4).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y)
        if how == "loss" and step == 3:
            loss = loss + torch.log(-loss)
    scale = 2.0**30 if how == "gradients" and step == 3 else 2.0**8
    optimizer.zero_grad()
    (loss * scale).backward()
    if how == "nothing" and step == 3:
        raise RuntimeError("for another reason")
    assert loss.isfinite()
    nn.utils.clip_grad_norm_(net.parameters(), scale, error_if_nonfinite=True)
    for parameter in net.parameters():
        parameter.grad /= scale
    optimizer.step()
""")
"""Ends in step 3 after the backward pass: for a non-finite loss or gradient, or for another reason."""


@pytest.mark.parametrize(("how", "code"), [("loss", "true-nan"), ("gradients", "scale-calibration"), ("nothing", None)])
def test_a_non_finite_step_that_ends_the_script_after_backward_is_investigated(
    tmp_path: Path, how: str, code: str | None
) -> None:
    record, _, _ = run_with_page(tmp_path, ENDS_AFTER_BACKWARD, how)
    assert [found.code for found in record.findings] == ([code] if code else [])
    assert (record.steps_run, record.steps_skipped) == ((4, 1) if code else (3, 0))
    assert [made.step for made in record.investigations] == ([3] if code else [])


LEFT_OVER = scripts.loop("""
bad = int(sys.argv[1])
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(3):
    optimizer.zero_grad()
    for number in range(5):
        x = torch.randn(8, 16).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            share = net(x).sigmoid() * (1e-9 if 5 * epoch + number == bad else 1.0)
            loss = -torch.log(share + 1e-9).mean()
        scaler.scale(loss).backward()
        if number % 3 == 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
torch.save(net.state_dict(), "net.pt")
""")
"""Steps after three micro-batches: two of the five in an epoch are left over."""


@pytest.mark.parametrize("bad", slow_except([4, 14], [3, 4, 13, 14]))
def test_a_failing_micro_batch_without_an_optimizer_step_is_named_and_captured(tmp_path: Path, bad: int) -> None:
    step = 1 if bad < 5 else 3  # each epoch takes one step
    record, _, code = run_with_page(tmp_path, LEFT_OVER, str(bad))
    assert (code, record.verdict) == (1, "precision")
    assert first_finding(record) == ("eps-underflow", step, "", "loss = -torch.log(share + 1e-9).mean()")
    assert steps_captured(record) == [step]
    assert_unwatched_saves_the_same(tmp_path, str(bad))
    replayed = start(tmp_path, "replay", captured(record)[0])
    assert f"eps-underflow · step {step} · forward" in replayed.stdout, replayed.stderr


def test_replay_reports_that_a_captured_step_no_longer_fails_after_a_fix(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, LEFT_OVER, "2")
    (tmp_path / "train.py").write_text(LEFT_OVER.replace("log(share + 1e-9)", "log(share.float() + 1e-9)"))
    replayed = start(tmp_path, "replay", captured(record)[0])
    said = " ".join(replayed.stdout.split())
    assert "where the loss is inf. No replay of it fails" in said
    assert "step 0 does not fail in any of 5 replays: its loss is 2" in said
    assert ", and was inf when it was captured" in said
    assert "step 0 fails in 0 of 5 unchanged replays" in said
