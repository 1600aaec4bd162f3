"""Inputs of a step from outside: bad targets, a teacher's outputs, and non-finite outputs of another network."""

from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_captures import capture_of, run_on_capture
from tests.script.test_run import captured, first_finding, run, run_with_page, steps_captured
from tests.siblings import slow_except

TARGETS = scripts.loop("""
kind, value = sys.argv[1], float(sys.argv[2])

class Criterion(torch.nn.Module):
    def forward(self, out, targets):
        if kind == "assert":
            assert (targets["boxes"] >= 0).all()
        return F.mse_loss(out, targets["boxes"])

class Teacher(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / (0 if is_bad else 1) * 0  # of finite numbers

model, teacher, criterion = torch.nn.Linear(8, 4).cuda(), Teacher(8, 4).cuda(), Criterion()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
once = kind in ("criterion", "assert", "distilled once", "once", "raises")
for step in range(7):
    x, y = torch.randn(16, 8).cuda(), torch.rand(16, 4).cuda()
    is_bad = step == 3 if once else step >= 3
    if is_bad and value != 1.0:
        y[5, 2] = value
    with torch.autocast("cuda", dtype=torch.float16):
        if "distilled" in kind:
            with torch.no_grad():
                y = teacher(x).float()
        out = model(x)
        if kind == "raises":
            assert (y >= 0).all()
        if kind == "operators":
            loss = ((out.float() - y) ** 2).mean()
        elif kind == "masked":
            loss = F.mse_loss(out.float(), torch.where(y.isfinite(), y, out.float().detach()))
            loss = loss * (torch.zeros((), device=x.device) / (0.0 if is_bad else 1.0))
        elif kind == "padded":
            kept = y.isfinite()
            loss = F.mse_loss(out.float()[kept], y[kept])
        elif kind == "mask":
            loss = F.cross_entropy(out.float() + y.where(y.isinf(), 0.0), torch.zeros(16, dtype=torch.long).cuda())
        elif kind in ("criterion", "assert", "distilled once"):
            loss = criterion(out, {"boxes": y})
        else:
            loss = F.mse_loss(out, y)
    STEP
""")
"""From step 3 on, or only in step 3, one target element holds ``value``; ``kind`` selects how the target is used."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value", "held"),
    [
        ("once", "nan", "1 NaN among 64 values in argument 2 of mse_loss on line 48 of train.py"),
        ("function", "inf", "1 inf among 64 values in argument 2 of mse_loss on line 48 of train.py"),
        ("function", "-inf", "1 inf among 64 values in argument 2 of mse_loss on line 48 of train.py"),
        ("operators", "nan", "1 NaN among 64 values in argument 2 of sub on line 36 of train.py"),
    ],
)
def test_targets_with_nan_or_inf_are_bad_data_and_captured_at_their_step(
    tmp_path: Path, kind: str, value: str, held: str
) -> None:
    record, page, _ = run_with_page(tmp_path, TARGETS, kind, value)
    assert (record.verdict, record.findings[0].code, record.findings[0].step) == ("other", "data-nonfinite", 3)
    assert steps_captured(record)[0] == 3
    assert kind != "once" or len(captured(record)) == 1
    assert record.findings[0].message == f"the batch of step 3 holds {held}, first in sample 5"
    assert [finding.code for finding in record.findings[1:]] in ([], ["scale-collapse"])
    assert "Bad data: the batch of step 3 holds inf or NaN." in page
    start(tmp_path, "replay", captured(record)[0], "--record=again.json")
    again = read_record(tmp_path / "again.json")
    assert (again.verdict, first_finding(again)[0]) == ("other", "data-nonfinite")
    assert again.findings[0].message == record.findings[0].message


@pytest.mark.parametrize("kind", slow_except(["criterion"], ["criterion", "assert"]))
def test_one_bad_target_of_a_criterion_module_is_bad_data_at_its_step(tmp_path: Path, kind: str) -> None:
    record, _, _ = run_with_page(tmp_path, TARGETS, kind, "nan")
    assert (record.verdict, record.findings[0].code, record.findings[0].step) == ("other", "data-nonfinite", 3)
    told = "1 NaN among 64 values in argument 2['boxes'] of Criterion on line 46 of train.py, first in sample 5"
    assert record.findings[0].message == f"the batch of step 3 holds {told}"


BATCH_OBJECTS = scripts.loop("""
import dataclasses, types

@dataclasses.dataclass
class Batch:
    x: torch.Tensor

MAKE = {"dataclass": Batch, "namespace": lambda x: types.SimpleNamespace(x=x), "store": lambda x: Batch({"x": [x]})}

class Net(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch.x["x"][0] if type(batch.x) is dict else batch.x)

model = Net(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(5):
    x, y = torch.randn(16, 8), torch.rand(16, 4).cuda()
    if step == 3:
        x[5, 2] = float("nan")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(model(MAKE[sys.argv[1]](x)), y)
    STEP
""")


@pytest.mark.parametrize("kind", slow_except(["store"], ["dataclass", "namespace", "store"]))
def test_nan_inside_an_object_of_the_batch_is_bad_data(tmp_path: Path, kind: str) -> None:
    record, _, _ = run_with_page(tmp_path, BATCH_OBJECTS, kind)
    assert (record.verdict, record.findings[0].code, record.findings[0].step) == ("other", "data-nonfinite", 3)
    path = ".x['x'][0]" if kind == "store" else ".x"
    assert f"holds 1 NaN among 128 values in argument 1{path} of Net" in record.findings[0].message


MADE_IN_HALF = scripts.loop("""
model = torch.nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(5):
    x, y = torch.randn(16, 8).cuda(), torch.rand(16, 4).cuda()
    y[5, 2] = y[5, 2] * (step != 3)
    with torch.no_grad():
        target = torch.log(torch.clamp(y.half(), 1e-9))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(model(x), target)
    STEP
""")


def test_a_target_that_overflows_in_a_half_cast_of_the_script_is_not_bad_data(tmp_path: Path) -> None:
    record, page, _ = run_with_page(tmp_path, MADE_IN_HALF)
    assert (record.verdict, record.findings[0].code, record.findings[0].step) == ("inconclusive", "unknown", 3)
    assert "in that float16 tensor" in record.findings[0].message
    assert "no precision setting helps" not in page


CENTRED = scripts.loop("""
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.out = torch.nn.Parameter(torch.randn(1, 16)), torch.nn.Linear(16, 16)
    def forward(self, x):
        return self.out(x + self.token)
student = Net().cuda()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer, scaler = torch.optim.AdamW(student.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", init_scale=2.0**14)
center = torch.zeros(1, 16)
for step in range(20):
    x = torch.randn(8, 16)
    x[3, 0] *= float(sys.argv[1]) if step == 16 else 1.0
    with torch.autocast("cuda", dtype=torch.float16):
        with torch.no_grad():
            y = teacher(x)
            target = torch.softmax(y - center, -1)
        center = center * 0.9 + y.mean(0, keepdim=True).float() * 0.1
        loss = -(target * torch.log_softmax(student(x), -1)).sum(-1).mean()
    STEP
    with torch.no_grad():
        kept, new = list(teacher.parameters()), list(student.parameters())
        torch._foreach_mul_(kept, 0.99)
        torch._foreach_add_(kept, new, alpha=0.01)
""")


def test_a_step_with_a_running_center_of_an_ema_teacher_agrees_with_fp32(tmp_path: Path) -> None:
    record, page, _ = run_with_page(tmp_path, CENTRED, "nan")
    assert "step 12 agrees with FP32" in page or "step 10 agrees with FP32" in page
    assert (record.verdict, record.findings[0].code, record.findings[0].step) == ("other", "data-nonfinite", 16)


SOUND = [(kind, "1") for kind in ("function", "operators", "criterion", "assert")]
SOUND += [("padded", "nan"), ("mask", "-inf")]


@pytest.mark.parametrize("of", slow_except(SOUND[-2:], SOUND), ids="-".join)
def test_finite_targets_excluded_nan_padding_and_masks_of_inf_are_healthy(tmp_path: Path, of: tuple[str, str]) -> None:
    record, _, _ = run_with_page(tmp_path, TARGETS, *of)
    assert (record.verdict, record.findings) == ("healthy", ())


@pytest.mark.slow
def test_nan_padding_is_not_blamed_for_a_true_nan(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, TARGETS, "masked", "nan")
    found = record.findings[0]
    assert (record.verdict, found.code, found.op) == ("other", "true-nan", "aten.div.Tensor")
    assert "data-nonfinite" not in [finding.code for finding in record.findings]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilled", "distilled once"])
def test_non_finite_outputs_of_a_teacher_are_a_true_nan_and_not_bad_data(tmp_path: Path, kind: str) -> None:
    record, _, _ = run_with_page(tmp_path, TARGETS, kind, "1")
    assert (record.verdict, record.steps_skipped) == ("other", 4 if kind == "distilled" else 1)
    line = "return super().forward(x) / (0 if is_bad else 1) * 0  # of finite numbers"
    assert (len(record.findings), first_finding(record)) == (1, ("true-nan", 3, "", line))


@pytest.mark.slow
def test_a_bad_target_is_not_blamed_if_the_script_raises_before_its_loss(tmp_path: Path) -> None:
    record, page, _ = run_with_page(tmp_path, TARGETS, "raises", "nan")
    assert (record.verdict, record.findings) == ("inconclusive", ())
    assert "every module output is finite, and the script's own code after them could not be replayed" in page


ADVERSARIES = scripts.loop("""
class Generator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Conv1d(8, 1, 3, padding=1)
    def forward(self, mel):
        return torch.tanh(self.inner((mel + 5.0) / 5.0))

generator, critic = Generator().cuda(), torch.nn.Conv1d(1, 1, 3, padding=1).cuda()
first, second = (torch.optim.Adam(model.parameters(), 1e-4) for model in (generator, critic))
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(6):
    mel = torch.randn(4, 8, 20)
    if step == 2:
        mel[2, :, 3:6] = float(sys.argv[1])  # the logarithm of a silent frame
    mel, audio = mel.cuda(), torch.randn(4, 1, 20).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (critic(generator(mel)) - 1).pow(2).mean()
    first.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(first)
    with torch.autocast("cuda", dtype=torch.float16):
        made = generator(mel).detach()
    second.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (critic(audio) - 1).pow(2).mean() + critic(made).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(second)
    scaler.update()
    if not loss.isfinite():
        break
""")


@pytest.mark.slow
@pytest.mark.parametrize(("value", "held"), [("-inf", "24 inf"), ("nan", "24 NaN")])
def test_one_bad_batch_in_a_gan_loop_is_bad_data(tmp_path: Path, value: str, held: str) -> None:
    _, record = run(tmp_path, ADVERSARIES, value)  # each iteration is a step of two optimizers
    assert [found.code for found in record.findings] == ["data-nonfinite"]
    assert f"the batch of step 4 holds {held} among 640 values in argument 1 of " in record.findings[0].message
    assert record.findings[0].message.endswith(" of train.py, first in sample 2")


@pytest.mark.slow
def test_a_gan_loop_with_finite_batches_is_healthy(tmp_path: Path) -> None:
    assert run(tmp_path, ADVERSARIES, "1")[1].verdict == "healthy"


ATTENDING = scripts.loop("""
class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
    def forward(self, x, mask):
        return (self.inner(x) @ x.mT + mask).softmax(-1) @ x

model = Attention().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(6):
    x, mask = torch.randn(4, 5, 8).cuda(), torch.zeros(4, 5, 5)
    mask[:, :, 4] = -torch.inf
    if step == 3:
        mask[2] = -torch.inf  # a sample of padding alone
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x, mask.cuda()) - x).pow(2).mean()
    STEP
""")


def test_the_softmax_of_a_fully_masked_row_is_a_true_nan_and_not_bad_data(tmp_path: Path) -> None:
    _, record = run(tmp_path, ATTENDING)
    assert [(found.code, found.step) for found in record.findings] == [("true-nan", 3)]


CHAINED = scripts.loop("""
kind, gain = sys.argv[1], float(sys.argv[2])
first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.LayerNorm(4)).cuda()
second = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
with torch.no_grad():
    first[0].weight.mul_(gain)
trained = [*second.parameters()]
if kind != "frozen":
    trained += first.parameters()
optimizer, scaler = torch.optim.Adam(trained, 1e-3), torch.amp.GradScaler("cuda")
for step in range(6):
    x = torch.randn(16, 8, device="cuda")
    if kind == "adversaries":
        with torch.autocast("cuda"):
            loss = (second(torch.randn(16, 4, device="cuda")) - 1).float().square().mean()
        scaler.scale(loss).backward()
    with torch.autocast("cuda"):
        if kind == "frozen":
            with torch.no_grad():
                given = first(x)  # <- frozen
            loss = second(given).float().square().mean()
        else:
            given = first(x)
            loss = second(given.detach()).float().square().mean() + 1e-6 * given.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""")
"""With a gain of 3e5 the first network overflows in FP16; in FP32 LayerNorm makes its values small."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "module"), [("chained", "first.0"), ("adversaries", "first.0"), ("frozen", "")])
def test_an_overflow_of_one_network_is_not_bad_data_of_the_next(kind: str, module: str, tmp_path: Path) -> None:
    _, record = run(tmp_path, CHAINED, kind, "3e5")
    first = record.findings[0]
    assert (record.verdict, first.code, first.step, first.module) == ("precision", "forward-overflow", 0, module)
    assert {found.code for found in record.findings} <= {"forward-overflow", "scale-collapse"}
    assert (record.investigations[0].reach, record.unseen.notes) == ("whole", ())


@pytest.mark.parametrize("kind", slow_except(["chained"], ["chained", "adversaries", "frozen"]))
def test_chained_networks_without_an_overflow_are_healthy(kind: str, tmp_path: Path) -> None:
    assert run(tmp_path, CHAINED, kind, "1")[1].verdict == "healthy"


@pytest.mark.slow
def test_an_overflow_of_a_frozen_network_is_patched_at_the_line_that_calls_it(tmp_path: Path) -> None:
    _, record = run(tmp_path, CHAINED, "frozen", "3e5")
    line = CHAINED.splitlines().index("                given = first(x)  # <- frozen") + 1
    assert record.findings[0].source
    assert record.findings[0].source.line == line
    capture = capture_of(tmp_path)
    _, again = run_on_capture(tmp_path, "replay", capture)
    assert (again.verdict, again.findings[0].code) == ("precision", "forward-overflow")
    suggested, ended = run_on_capture(tmp_path, "suggest-fp32", capture)
    assert ended.search is not None
    assert (ended.search.outcome, [pin.source and pin.source.line for pin in ended.pins]) == ("found", [line])
    assert suggested.code == 0, suggested.stderr
    assert "+                    given = first(x)  # <- frozen\n" in suggested.stdout
    assert f"#   - first() on line {line} of train.py\n# Proven by" in suggested.stdout


DISTILLED = scripts.loop("""
fault, ends = sys.argv[1], sys.argv[2] == "ends"

class Attention(torch.nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.query, self.key, self.gain = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), gain
    def forward(self, x):
        q, k = self.query(x) * self.gain, self.key(x) * self.gain
        return (q @ k.transpose(-2, -1)) / self.gain**2  # HERE

class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 8))
    def forward(self, student, teacher):
        target = F.softmax((teacher.float() - self.center) / 0.4, dim=-1).detach()
        loss = -(target * F.log_softmax(student.float() / 0.9, dim=-1)).sum(-1).mean()
        self.center = self.center * 0.5 + teacher.float().mean((0, 1)) * 0.5
        return loss

high = 600.0 if fault != "none" else 1.0
student = Attention(1.0 if fault == "teacher" else high).cuda()
teacher, criterion = Attention(high).cuda(), Centred().cuda()
teacher.load_state_dict(student.state_dict())
for weight in teacher.parameters():
    weight.requires_grad = False
optimizer, scaler = torch.optim.SGD(student.parameters(), lr=1e-2), torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(6):
    x = torch.randn(4, 8, 16).cuda() * 3
    with torch.autocast("cuda", dtype=torch.float16):
        target = teacher(x)
        loss = criterion(student(x), target)
    if ends and not math.isfinite(loss.item()):
        sys.exit(1)
    STEP
""")
LINE = next(number for number, line in enumerate(DISTILLED.splitlines(), start=1) if line.endswith("# HERE"))


OVERFLOWING = [("both", "ends"), ("both", "goes on"), ("teacher", "ends")]


@pytest.mark.parametrize("of", slow_except(OVERFLOWING[:1], OVERFLOWING), ids="-".join)
def test_an_overflow_of_the_teacher_alone_or_with_the_student_is_named(tmp_path: Path, of: tuple[str, str]) -> None:
    record, _, _ = run_with_page(tmp_path, DISTILLED, *of)
    found = record.findings[0]
    assert (record.verdict, found.code, found.op) == ("precision", "forward-overflow", "aten.bmm.default")
    assert (found.step, found.source and found.source.line) == (0, LINE)
    assert record.investigations[0].reach == "whole"


@pytest.mark.slow
def test_a_patch_for_an_overflow_of_student_and_teacher_is_proven(tmp_path: Path) -> None:
    run_with_page(tmp_path, DISTILLED, "both", "ends")
    (capture,) = (tmp_path / ".ampdbg" / "captures").glob("*.safetensors")
    result = start(tmp_path, "suggest-fp32", str(capture))
    page = " ".join(result.stderr.split())
    assert "✓ 2 places need FP32; the patch for them is proven on the failing step." in page
    assert "what step 0 is given" not in page + result.stdout


@pytest.mark.slow
def test_a_replay_starts_from_the_loss_buffer_before_the_step(tmp_path: Path) -> None:
    options = ("--emulate", "--capture-step=3")
    _, record = run(tmp_path, DISTILLED, "none", "goes on", options=options)
    assert (record.verdict, record.findings) == ("healthy", ())
    (capture,) = (tmp_path / ".ampdbg" / "captures").glob("*.safetensors")
    assert start(tmp_path, "replay", "--record=again.json", str(capture)).code == 0
    again = read_record(tmp_path / "again.json")
    loss = next(step.loss for step in record.steps if step.step == 3)
    assert again.investigations[0].low.loss == loss


LARGE = scripts.loop("""
net = torch.nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
for _ in range(3):
    x = torch.randn(12, 16).cuda()
    x[9, 0] = float(sys.argv[1])
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x).float().square().mean()
    STEP
""")


@pytest.mark.parametrize(("value", "found"), [("4e5", "data-range"), ("4", "")])
def test_a_batch_value_beyond_fp16_is_named_by_sample_and_argument(tmp_path: Path, value: str, found: str) -> None:
    record = run(tmp_path, LARGE, value)[1]
    named = [one.message for one in record.faults if one.code == found]
    assert [one.code for one in record.faults[:1]] == [found] * len(named)
    assert all("400,000 in sample 9 of argument 1 of Linear on line " in message for message in named)
    assert len(named) == bool(found)
