"""Captures of failing steps: written while the script trains, replayed after its process has ended."""

import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from ampdbg.agreement import is_same_run
from ampdbg.files import TEMPORARY
from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from ampdbg.script.capture import Captures
from ampdbg.script.launch import Start
from tests.commands.program import Here, Result, environment, start
from tests.script import scripts
from tests.script.test_run import by_python, captured, first_finding, run, steps_captured
from tests.siblings import slow_except

COLLAPSES = (
    scripts.MODEL.replace("GAIN", "self.gain").replace("    def forward", "    gain = 1.0\n\n    def forward")
    + """
for step in range(400):
    if step == 300:
        net[3].gain = 1e3
    if step == 320:
        os.kill(os.getpid(), signal.SIGKILL)
    x, y = batch()
    with torch.autocast("cuda"):
        loss = criterion(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
)
"""``similar`` overflows from step 300 on, and the process is killed at step 320."""


def capture_of(folder: Path) -> Path:
    """Returns the first capture of a run in the folder."""
    return min((folder / ".ampdbg" / "captures").glob("*.safetensors"))


def run_on_capture(folder: Path, command: str, capture: Path, *options: str) -> tuple[Result, Record]:
    """Runs a command on a capture and reads its record."""
    result = start(folder, command, str(capture), "--record=c.json", *options)
    assert (folder / "c.json").exists(), result.stderr
    return result, read_record(folder / "c.json")


def test_an_overflow_beside_a_frozen_mask_is_named_by_module_op_and_line_and_captured(tmp_path: Path) -> None:
    made = "self.attention, self.out ="
    mask = "self.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)"
    result, record = run(tmp_path, scripts.PLAIN.replace(made, f"{mask}\n        {made}"), "400", "6")
    assert first_finding(record) == ("forward-overflow", 0, "attention", "scores = h @ h.transpose(-1, -2)")
    found = record.findings[0]
    assert (result.code, record.verdict, found.op) == (1, "precision", "aten.bmm.default")
    value = found.evidence["value"]
    assert isinstance(value, float)
    assert value > 65504
    assert captured(record)
    assert record.script is not None
    assert record.script.exit_code == 0


@pytest.mark.slow
def test_a_capture_of_a_killed_process_works_in_another_folder(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    (first / "train.py").write_text(COLLAPSES, encoding="utf-8")
    ended = start(first, "run", "--emulate", "train.py")
    assert ended.code == -signal.SIGKILL
    shutil.copy(capture_of(first), other / "step.safetensors")
    shutil.copy(first / "train.py", other / "train.py")
    shutil.rmtree(first)
    capture = other / "step.safetensors"

    result, record = run_on_capture(other, "replay", capture)
    found = record.findings[0]
    assert (result.code, found.code, found.module, found.op) == (1, "forward-overflow", "3", "aten.mm.default")
    assert first_finding(record)[3].startswith("similar = ")
    made = record.investigations[0]
    assert (made.step, made.reproduced, made.tries) == (300, 5, 5)
    assert "step 300 fails in 5 of 5 unchanged replays" in " ".join(result.stdout.split())
    # The captured gain, not the gain of the script's first steps.
    value = found.evidence["value"]
    assert isinstance(value, float)
    assert value > 65504

    result, record = run_on_capture(other, "bisect", capture)
    assert (result.code, [pin.name for pin in record.pins]) == (1, ["3"])

    result, record = run_on_capture(other, "suggest-fp32", capture)
    assert result.code == 0
    assert record.verification is not None
    assert record.verification.passed
    steps = {step.name: step.detail for step in record.verification.steps}
    assert steps["further batches"].startswith("not run")
    assert steps["training"].startswith("not run")
    assert "+++ b/train.py" in result.stdout


def test_a_patch_from_a_capture_makes_the_script_healthy(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    result = start(tmp_path, "suggest-fp32", str(capture_of(tmp_path)), "--apply")
    assert result.code == 0
    patched = start(tmp_path, "run", "--emulate", "--record=p.json", "train.py", "400", "6")
    record = read_record(tmp_path / "p.json")
    assert (patched.code, record.verdict) == (0, "healthy")
    assert not record.steps[-1].skipped


LIBRARYS = scripts.loop("""
class Mix(nn.Module):
    def forward(self, x):
        large = x * float(sys.argv[1]) * 2e-3
        similar = large @ large.transpose(-1, -2)
        return x + similar.mean(-1, keepdim=True) / 1e7

net = nn.Sequential(nn.Linear(16, 16), Mix(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
net = nn.DataParallel(net).cuda()
with torch.no_grad():
    net.module[2].weight.mul_(float(sys.argv[1]))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
for step in range(6):
    x, y = torch.randn(8, 16, device="cuda"), torch.randint(4, (8,), device="cuda")
    with torch.autocast("cuda"):
        loss = nn.functional.cross_entropy(net(x), y)
    STEP
""")
"""With a factor of 3e5 a layer that torch's own code calls overflows, and so do lines above it; not with 1."""


@pytest.mark.slow
def test_a_library_module_is_kept_in_fp32_after_the_line_that_makes_the_model(tmp_path: Path) -> None:
    run(tmp_path, LIBRARYS, "3e5")
    result, record = run_on_capture(tmp_path, "suggest-fp32", capture_of(tmp_path), "--apply")
    assert (result.code, [pin.name for pin in record.pins]) == (0, ["1", "2"])
    assert record.handover is not None
    first = LIBRARYS.splitlines().index("        large = x * float(sys.argv[1]) * 2e-3") + 1
    units = [unit.title for unit in record.handover.units]
    assert units == [f"lines {first} to {first + 2} of train.py", "module 2, by name"]
    assert record.verification is not None
    of_layer = next(step.detail for step in record.verification.steps if step.name == "without module 2, by name")
    assert (
        f"train.py:{LIBRARYS.splitlines().index('        loss = nn.functional.cross_entropy(net(x), y)') + 1})"
        in of_layer
    )
    text = (tmp_path / "train.py").read_text(encoding="utf-8")
    made = next(line for line in LIBRARYS.splitlines() if line.startswith("net = nn.Seq"))
    assert f"{made}\n_keep_in_fp32(net)\n" in text
    for factor in ("3e5", "1"):
        patched, record = run(tmp_path, text, factor)
        assert (patched.code, record.verdict) == (0, "healthy")


STACK = scripts.loop("""
class Attention(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.inner, self.gain = nn.Linear(32, 96), gain

    def forward(self, x):
        q, k, v = (self.inner(x) * self.gain).chunk(3, dim=-1)
        SIM
        return x + (sim / 1e6).softmax(dim=-1) @ v / self.gain

net = nn.Sequential(*(Attention(float(sys.argv[1]) if n in (2, 4) else 1.0) for n in range(6)), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
for step in range(3):
    x = torch.randn(8, 4, 32, device="cuda")
    with torch.autocast("cuda"):
        loss = net(x).pow(2).mean()
    STEP
""")
"""Six attentions of one class. With a factor of 1e3 two of them overflow; not with 1."""


@pytest.mark.slow
@pytest.mark.parametrize("sim", ["q @ k.transpose(-1, -2)", 'torch.einsum("bid,bjd->bij", q, k)'])
def test_a_line_that_overflows_in_two_of_six_modules_is_edited_in_their_class(tmp_path: Path, sim: str) -> None:
    run(tmp_path, STACK.replace("SIM", f"sim = {sim}"), "1e3")
    result, record = run_on_capture(tmp_path, "suggest-fp32", capture_of(tmp_path), "--apply")
    assert (result.code, [pin.name for pin in record.pins]) == (0, ["2:own", "4:own"])
    assert record.handover is not None
    (unit,) = record.handover.units
    assert unit.notes[0].startswith("applies to all 6 instances of Attention, 2 of them in the set: ")
    assert "_keep_in_fp32" not in (tmp_path / "train.py").read_text(encoding="utf-8")
    for factor in ("1e3", "1"):
        patched, record = run(tmp_path, (tmp_path / "train.py").read_text(encoding="utf-8"), factor)
        assert (patched.code, record.verdict) == (0, "healthy")


@pytest.mark.slow
def test_modules_of_an_installed_class_are_pinned_by_name(tmp_path: Path) -> None:
    head, model = STACK.replace("SIM", "sim = q @ k.transpose(-1, -2)").split("class Attention")
    attention, rest = model.split("net = ", 1)
    (installed := tmp_path / "site-packages").mkdir()
    (installed / "stack.py").write_text(f"{head}class Attention{attention}", encoding="utf-8")
    path = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    run(tmp_path, f"{path}{head}from stack import Attention\nnet = {rest}", "1e3")
    result, record = run_on_capture(tmp_path, "suggest-fp32", capture_of(tmp_path))
    assert (result.code, [pin.name for pin in record.pins]) == (0, ["2", "4"])
    assert record.handover is not None
    assert [unit.title for unit in record.handover.units] == ["module 2, by name", "module 4, by name"]


@pytest.mark.slow
def test_clipping_before_unscaling_does_not_hide_an_overflow(tmp_path: Path) -> None:
    early = scripts.PLAIN.replace("        scaler.unscale_(optimizer)\n", "")
    result, record = run(tmp_path, early, "1", "6")
    assert [(found.code, found.root) for found in record.findings] == [("misuse-clip-scaled", None)]
    result, record = run(tmp_path, early, "400", "6")
    expected = [("forward-overflow", "aten.bmm.default", None), ("misuse-clip-scaled", "", None)]
    assert [(found.code, found.op, found.root) for found in record.findings[:2]] == expected
    result, record = run_on_capture(tmp_path, "suggest-fp32", capture_of(tmp_path))
    assert (result.code, [pin.name for pin in record.pins]) == (0, ["attention:own"])
    assert "clip after unscaling: scaler.unscale_(optimizer), then clip_grad_norm_" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_a_patch_of_an_imported_file_is_proven_in_the_script(tmp_path: Path) -> None:
    head, _, rest = scripts.PLAIN.partition("class Net(")
    head, imports = head.replace("torch.manual_seed(0)", ""), head.partition("torch.manual_seed")[0]
    (tmp_path / "parts.py").write_text(head, encoding="utf-8")
    text = f"{imports}from parts import Attention, device\ntorch.manual_seed(0)\nclass Net({rest}"
    run(tmp_path, text, "400", "6")
    result, record = run_on_capture(tmp_path, "suggest-fp32", capture_of(tmp_path))
    assert (result.code, record.verification is not None and record.verification.passed) == (0, True)
    assert "+++ b/parts.py" in result.stdout


SIMILAR = "similar = (x * 1e3) @ (x * 1e3).transpose(-1, -2)"
CASES: dict[str, tuple[str, str, str, str]] = {
    "a line of the script": (
        scripts.LOSS_LINE.replace("GAIN", "1000.0"),
        "forward-overflow",
        "",
        "similar = (y * 1000.0) @ (y * 1000.0).T",
    ),
    "a GAN": (scripts.GAN.replace("GAIN", "1e9"), "gradient-overflow", "", "lossG = criterion(netD(fake), one) * 1e9"),
    "a model in a function": (
        scripts.ONE_MODULE.replace("GAIN", "1e4"),
        "forward-overflow",
        "",
        "return (x @ self.weight).float().mean()",
    ),
    "one of three turns": (
        scripts.ALTERNATING.replace("GAIN", "1e3"),
        "forward-overflow",
        "",
        "squared = (y * 1e3) @ (y * 1e3).T",
    ),
    **{name: (text.replace("GAIN", "1e3"), "forward-overflow", "3", SIMILAR) for name, text in scripts.LOOPS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_replay_reproduces_the_finding_and_the_numbers_of_the_run(tmp_path: Path, case: str) -> None:
    text, code, module, line = CASES[case]
    result, record = run(tmp_path, text)
    found = record.findings[0]
    assert (result.code, *first_finding(record)[::2], first_finding(record)[3]) == (1, code, module, line)
    result, again = run_on_capture(tmp_path, "replay", capture_of(tmp_path))
    found_again = again.findings[0]
    assert (result.code, again.verdict) == (1, record.verdict)
    assert (found_again.code, found_again.module, found_again.op) == (found.code, found.module, found.op)
    assert found_again.source == found.source
    here = again.investigations[0]
    there = next(made for made in record.investigations if made.step == here.step)
    for one, other in zip(there.replays, here.replays, strict=True):
        assert (one.dtype, one.scale) == (other.dtype, other.scale)
        assert str(one.loss) == str(other.loss)
        assert str(one.grad_norm) == str(other.grad_norm)


@pytest.mark.slow
def test_replay_accepts_a_short_script_that_makes_the_same_calls(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    few = """
import torch
import torch.nn.functional as F
from train import Net

net = Net(1.0)
optimizer = torch.optim.SGD(net.parameters())
for _ in range(2):
    F.cross_entropy(net(torch.randn(2, 5, 16)), torch.randint(4, (2,))).backward()
    optimizer.step()
"""
    (tmp_path / "few.py").write_text(few, encoding="utf-8")
    result, record = run_on_capture(tmp_path, "replay", capture_of(tmp_path), "--script", "few.py")
    assert (result.code, *first_finding(record)[:3:2]) == (1, "forward-overflow", "attention")
    assert record.investigations[0].reproduced == 5
    assert result.stdout.rstrip().endswith("--script few.py")  # the suggested command starts the same script


MOVES = scripts.loop("""
class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.force, self.gain = nn.Linear(3, 3), 1e3

    def forward(self, place):
        place += self.force(place - place.mean(0)).float()
        far = (place * self.gain) @ (place * self.gain).T
        return far.mean(-1) / self.gain**2

net = Moves().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for step in range(4):
    place = torch.randn(6, 3, device="cuda").detach()
    with torch.autocast("cuda"):
        loss = net(place).pow(2).mean()
    STEP
""")
"""The model writes into its argument, as models of moving molecules and bodies do."""


@pytest.mark.slow
def test_in_place_writes_to_arguments_are_undone_before_each_replay(tmp_path: Path) -> None:
    _, record = run(tmp_path, MOVES)
    result, again = run_on_capture(tmp_path, "replay", capture_of(tmp_path))
    here = again.investigations[0]
    there = next(made for made in record.investigations if made.step == here.step)
    assert (result.code, again.findings[0].code) == (1, "forward-overflow")
    assert here.reproduced == 5
    assert [str(one.loss) for one in here.replays] == [str(one.loss) for one in there.replays]
    _, searched = run_on_capture(tmp_path, "bisect", capture_of(tmp_path))
    assert ([pin.module for pin in searched.pins], searched.search and searched.search.minimal) == ([""], True)


SETTLES = scripts.loop("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(16, 64), nn.Linear(64, 1), 1.0

    def forward(self, x):
        return self.b((self.a(x) * self.gain).float() / self.gain)

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-7)
scaler = torch.amp.GradScaler("cuda")
for step in range(34):
    net.gain = 1.0 if step < 30 else 1e5
    if step == 2:
        import ampdbg
        ASK
    with torch.autocast("cuda"):
        loss = (net(torch.randn(64, 16, device="cuda")) - 30.0 * torch.randn(64, 1, device="cuda")).square().sum()
    STEP
""")
"""The loss scale settles in the first steps, and from step 30 on the loss is not finite."""


@pytest.mark.slow
@pytest.mark.parametrize(("ask", "first"), [("pass", 30), ("ampdbg.capture()", 2)])
def test_captures_of_a_settling_scale_are_dropped_for_the_failing_step(tmp_path: Path, ask: str, first: int) -> None:
    record = run(tmp_path, SETTLES.replace("ASK", ask), options=("--emulate", "--max-captures=2"))[1]
    assert steps_captured(record) == sorted({first, 30})
    assert {Path(path) for path in captured(record)} == set((tmp_path / ".ampdbg" / "captures").iterdir())
    assert record.findings[0].code == "forward-overflow"


@pytest.mark.parametrize("lost_from", slow_except([3], [3, 6]))
def test_a_non_finite_loss_while_the_loss_scale_settles_is_captured(tmp_path: Path, lost_from: int) -> None:
    """No earlier step is healthy."""
    script = SETTLES.replace("ASK", "pass").replace("step < 30", f"step < {lost_from}")
    record = run(tmp_path, script, options=("--emulate", "--max-captures=2"))[1]
    assert steps_captured(record) == [lost_from]
    assert first_finding(record)[:2] == ("forward-overflow", lost_from)


TAKES_TURNS = scripts.loop("""
critic, actor = nn.Linear(8, 4).cuda(), nn.Linear(8, 8).cuda()
with torch.no_grad():
    critic.weight.mul_(1e6)
log_alpha = torch.zeros(1, requires_grad=True, device="cuda")
critics, actors = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (critic, actor))
alphas = torch.optim.Adam([log_alpha], lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
alpha = 0.2
for step in range(8):
    x = torch.rand(16, 8).cuda()
    with torch.autocast("cuda"):
        loss = critic(x).float().square().mean() * 1e-9
    critics.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(critics)
    with torch.autocast("cuda"):
        action = actor(x)
        loss = (alpha * action.float()).mean() - critic(action).float().mean() * 1e-9
    actors.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(actors)
    scaler.update()
    loss = -(log_alpha * action.detach().float().mean()).mean()
    alphas.zero_grad()
    loss.backward()
    alphas.step()
    alpha = log_alpha.exp()
""")
"""As in soft actor-critic: the step of the last optimizer ends after the forward pass of the first."""


@pytest.mark.slow
def test_a_step_after_a_step_of_another_optimizer_is_captured_and_replayed(tmp_path: Path) -> None:
    _, record = run(tmp_path, TAKES_TURNS, options=("--emulate", "--capture-step=3"))
    assert steps_captured(record) == [0, 1, 3]  # each optimizer has its own row: critic, actor, temperature
    assert [made.step for made in record.investigations] == [0, 1, 3]
    result, again = run_on_capture(tmp_path, "replay", Path(captured(record)[2]))
    assert (result.code, again.investigations[0].reproduced) == (1, 5)
    line = "loss = critic(x).float().square().mean() * 1e-9"
    assert first_finding(record) == ("forward-overflow", 0, "critic", line)
    assert first_finding(again) == ("forward-overflow", 0, "critic", line)  # where its row of skipped steps begins
    assert "step 3 was replayed" in again.findings[0].message
    # Its loss is compared with the losses of the critic, which are not finite, not with those of the temperature.
    assert again.investigations[0].continuation == record.investigations[2].continuation == ()


ASKS = {"a signal": "os.kill(os.getpid(), signal.SIGUSR1)", "code": "__import__('ampdbg').capture()"}


@pytest.mark.slow
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_signal_or_ampdbg_capture_captures_the_current_step(tmp_path: Path, ask: str) -> None:
    text = scripts.PLAIN.replace("import sys, torch", "import os, signal, sys, torch")
    text = text.replace("    for _ in range(steps):", f"    for step in range(steps):\n        if step == 2: {ask}")
    result, record = run(tmp_path, text, "1", "6")
    assert (result.code, record.verdict) == (0, "healthy")
    (capture,) = captured(record)
    weights = result.stdout.splitlines()[-1]
    plain, _ = run(tmp_path, scripts.PLAIN, "1", "6")
    assert plain.stdout.splitlines()[-1] == weights
    result, again = run_on_capture(tmp_path, "replay", Path(capture), "--script", "train.py 1 6")
    assert (result.code, again.verdict, again.investigations[0].step) == (0, "healthy", 2)
    assert is_same_run(again.investigations[0])


ERASED = scripts.loop("""
class Norm(nn.Module):
    def forward(self, x):
        x = x * GAIN
        return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()

net = nn.Sequential(nn.Linear(64, 32), Norm(), nn.Linear(32, 10)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for step in range(60):
    x, y = torch.randn(64, 64, device="cuda"), torch.randint(10, (64,), device="cuda")
    with torch.autocast("cuda"):
        loss = nn.functional.cross_entropy(net(x), y)
    STEP
""")
"""With a large gain the squares overflow, but division by inf gives zero: every loss is finite."""


@pytest.mark.slow
@pytest.mark.parametrize("gain", ["1.0", "900.0"])
def test_a_replay_of_a_requested_step_finds_an_overflow_that_no_loss_shows(tmp_path: Path, gain: str) -> None:
    options = ("--emulate", "--capture-step=50")
    result, record = run(tmp_path, ERASED.replace("GAIN", gain), options=options)
    # The run itself compares one healthy step with FP32, and shows the same.
    assert (result.code, record.verdict) == ((0, "healthy") if gain == "1.0" else (1, "precision"))
    (capture,) = (Path(path) for path in captured(record) if path.endswith("-step-50.safetensors"))
    result, again = run_on_capture(tmp_path, "replay", capture)
    if gain == "1.0":
        assert (result.code, again.verdict, again.findings) == (0, "healthy", ())
        return
    assert (result.code, *first_finding(again)[:3:2]) == (1, "silent-overflow", "1")
    assert first_finding(again)[3] == "return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()"


REFUSED = {"--max-capture-size=1kB": "it would take", "--max-captures=0": "at most 0 captures a run"}


@pytest.mark.slow
@pytest.mark.parametrize("option", REFUSED)
def test_a_refused_capture_request_leaves_every_step_untraced(tmp_path: Path, option: str) -> None:
    text = scripts.PLAIN.replace(
        "        optimizer.zero_grad()", "        print('modes', torch._C._len_torch_dispatch_stack())"
    )
    text = text.replace("for _ in range(steps):", "for step in range(steps):\n        net.zero_grad()")
    text = text.replace("            loss = F", f"            if step == 1: {ASKS['code']}\n            loss = F")
    result, record = run(tmp_path, text, "1", "6", options=("--emulate", option))
    depths = [line for line in result.stdout.splitlines() if line.startswith("modes")]
    assert [depth != depths[0] for depth in depths] == [False] * 6
    (note,) = (note for note in record.unseen.notes if "captured" in note)
    assert note.startswith("step 1 was not captured: ")
    assert REFUSED[option] in note


def test_capture_returns_false_outside_ampdbg_run(tmp_path: Path) -> None:
    assert by_python(tmp_path, "-c", "import ampdbg; print(ampdbg.capture())") == "False\n"


@pytest.mark.slow
def test_a_capture_from_a_gpu_is_replayed_on_an_emulated_gpu(made: Path, tmp_path: Path) -> None:
    def on_a_gpu(head: dict[str, Any]) -> None:
        head.update(device="cuda:0")
        head["start"]["emulate"] = False
        head["record"]["environment"]["device_name"] = "NVIDIA H100"

    changed(on_a_gpu)(capture_of(made), tmp_path / "c.safetensors")
    shutil.copy(made / "train.py", tmp_path / "train.py")
    result, record = run_on_capture(tmp_path, "replay", tmp_path / "c.safetensors")
    assert (result.code, record.environment.emulated, record.findings[0].module) == (1, True, "attention")
    notes = [note for note in record.unseen.notes if note.startswith("captured on NVIDIA H100, and replayed on cpu")]
    assert len(notes) == 1
    assert notes[0].endswith("its loss was NaN when captured, and is NaN here")


# Runs that cannot write a capture


def taken(folder: Path) -> tuple[str, ...]:
    (folder / "taken").write_text("", encoding="utf-8")
    return (f"--captures={folder / 'taken' / 'x'}",)


CANNOT: dict[str, tuple[Callable[[Path], tuple[str, ...]], str]] = {
    "a folder that cannot be made": (taken, "cannot be written"),
    "a capture beyond the limit": (lambda folder: ("--max-capture-size=1kB",), "--max-capture-size"),
    "none allowed": (lambda folder: ("--max-captures=0",), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CANNOT)
def test_a_script_continues_if_no_capture_can_be_written(tmp_path: Path, case: str) -> None:
    options, told = CANNOT[case]
    result, record = run(tmp_path, scripts.PLAIN, "400", "6", options=("--emulate", *options(tmp_path)))
    assert result.code == 1
    assert captured(record) == []
    notes = [note for note in record.unseen.notes if "captured" in note]
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)
    assert "Traceback" not in result.stderr
    bare = start(tmp_path, "run", "--emulate", "--no-watch", "train.py", "400", "6")
    assert bare.stdout == result.stdout


def test_runs_that_capture_in_the_same_second_keep_their_own_captures(tmp_path: Path) -> None:
    class At(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 1, 1, tzinfo=tz)

    one, other = (Captures(tmp_path, Start("train.py"), most=2, largest=99) for _ in range(2))
    with patch.multiple("ampdbg.script.capture", datetime=At, content_of=lambda *_: b"whole"):
        for captures in (one, other, one):
            captures.add(SimpleNamespace(facts=SimpleNamespace(step=3)))  # type: ignore[arg-type]
    assert [path.name for path in one.written] == ["20260101T000000Z-3-step-3.safetensors"]
    other.drop(3)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.slow
def test_no_investigate_still_writes_a_capture_that_can_be_replayed(tmp_path: Path) -> None:
    _, record = run(tmp_path, scripts.PLAIN, "400", "6", options=("--emulate", "--no-investigate", "--max-captures=1"))
    assert all(made.reach == "none" for made in record.investigations)
    (capture,) = captured(record)
    result, again = run_on_capture(tmp_path, "replay", Path(capture))
    assert (result.code, again.findings[0].code) == (1, "forward-overflow")


def test_a_bad_capture_size_is_refused_before_the_script_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')", encoding="utf-8")
    result = start(tmp_path, "run", "--max-capture-size=lots", "train.py")
    assert (result.code, result.stdout) == (2, "")
    assert "--max-capture-size: got 'lots'" in result.stderr


# Damaged, hostile and mismatched captures


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script and a capture of it."""
    folder = tmp_path_factory.mktemp("captured")
    run(folder, scripts.PLAIN, "400", "3")
    return folder


def header(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Returns the tensor entries, the JSON head and the tensor bytes of a capture."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    places = json.loads(content[8 : 8 + length])
    return places, json.loads(places["__metadata__"]["ampdbg.capture"]), content[8 + length :]


def written(path: Path, places: dict[str, Any], head: Any, rest: bytes) -> Path:
    places["__metadata__"]["ampdbg.capture"] = json.dumps(head)
    text = json.dumps(places).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return path


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], Path]:
    """Returns a function that writes the capture with a changed head."""

    def write(capture: Path, to: Path) -> Path:
        places, head, rest = header(capture)
        change(head)
        return written(to, places, head, rest)

    return write


def damaged_python(capture: Path, to: Path) -> Path:
    """Writes a capture whose state of Python's random generator holds a negative number."""
    places, head, rest = header(capture)
    words = head["random_state"]["list"][0]["list"][1]["tensor"]
    begin = places[words]["data_offsets"][0]
    return written(to, places, head, rest[:begin] + struct.pack("<q", -5) + rest[begin + 8 :])


def given_to_first(head: dict[str, Any], value: Any) -> None:
    head["calls"][0]["given"] = value


HOSTILE: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "truncated": (lambda capture, to: to.write_bytes(capture.read_bytes()[:-100]), "cannot be read as a capture"),
    "empty": (lambda capture, to: to.write_bytes(b""), "cannot be read as a capture"),
    "a pickle": (lambda capture, to: to.write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR."), "cannot be read"),
    "no capture": (lambda capture, to: written(to, {"__metadata__": {}}, None, b""), "of version nothing"),
    "of a newer version": (changed(lambda head: head.update(version=4)), "of version 4; this ampdbg reads version 3"),
    "a head of another kind": (changed(lambda head: head.update(calls=7)), "damaged capture: calls"),
    "a scale of nothing": (changed(lambda head: head.update(scale=0)), "damaged capture: scale"),
    "a damaged record": (changed(lambda head: head["record"].update(steps=3)), "damaged"),
    "deep nesting": (changed(lambda head: given_to_first(head, json.loads('{"list": [' * 400 + "]}" * 400))), ""),
    "a script elsewhere": (
        changed(lambda head: head["start"].update(name="/usr/bin/hacked.py")),
        "is not in this folder",
    ),
    "a module elsewhere": (
        changed(lambda head: head["start"].update(name="http.server", is_module=True, arguments=[])),
        "is not in this folder",
    ),
    "other calls": (changed(lambda head: head["calls"].pop()), "is like the captured one"),
    "a call of another name": (
        changed(lambda head: head["calls"][0].update(name="os.system")),
        "is a call of the model, and was one of os.system",
    ),
    "a value of no kind": (changed(lambda head: given_to_first(head, [{"eval": "1"}, {}])), "a value of no kind"),
    "a tensor that is not there": (changed(lambda head: given_to_first(head, [{"tensor": "x"}, {}])), "damaged"),
    "a negative word of the random state": (damaged_python, "its random state: can't convert negative value"),
    "a random state of text": (changed(lambda head: head.update(random_state="x")), "its random state"),
    "names to print": (
        changed(lambda head: head["start"].update(name="\x1b[31mred\u202e.py")),
        "is not in this folder",
    ),
}


STARTS_THE_SCRIPT = (
    "other calls",
    "a call of another name",
    "a value of no kind",
    "a tensor that is not there",
    "a negative word of the random state",
    "a random state of text",
)
"""These are found only after the script is restarted, which takes long."""


@pytest.mark.parametrize("case", slow_except(HOSTILE.keys() - set(STARTS_THE_SCRIPT), HOSTILE))
def test_a_hostile_capture_is_refused_with_one_error_line(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(made)
    make, told = HOSTILE[case]
    hostile = tmp_path / "hostile.safetensors"
    make(capture_of(made), hostile)
    result = Here(made, monkeypatch, capfd)("replay", str(hostile), "--quiet")
    assert result.code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert told in errors[0]
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr
    assert not (made / "hacked").exists()


UNLIKE: dict[str, tuple[str, str]] = {
    "a model of other shapes": (
        scripts.PLAIN.replace("nn.Linear(16, 4)", "nn.Linear(16, 5)"),
        "the script builds another model now: out.weight has the shape [5, 16], and had [4, 16]",
    ),
    "an error": ("raise ValueError('no data')", "train.py raised ValueError: no data"),
    "nothing left to do": (
        scripts.PLAIN.replace("    main(float", "    import os\n    os.path.exists('weights.pt') or main(float"),
        "train.py ended without a step; if it resumes from a file that it has written since, move that",
    ),
    "another loss": (
        scripts.PLAIN.replace("F.cross_entropy(net(x), target)", "F.multi_margin_loss(net(x), target)"),
        "call 2 is a call of torch.nn.functional.multi_margin_loss, and was one of torch.nn.functional.cross_entropy",
    ),
    "a loss of something else": (
        scripts.PLAIN.replace(
            "F.cross_entropy(net(x), target)", "F.cross_entropy(net(x).detach() + 0 * net(x), target)"
        ),
        "call 2 is a call of torch.Tensor.detach, and was one of torch.nn.functional.cross_entropy",
    ),
    "three calls more": (
        scripts.PLAIN.replace(
            "F.cross_entropy(net(x), target)", "(lost := F.cross_entropy(net(x), target)) + lost.square().mean()"
        ),
        "it makes 5 calls, and the captured one 2",
    ),
}
"""The changed script and the error message."""


@pytest.mark.slow
@pytest.mark.parametrize("case", UNLIKE)
def test_replay_says_why_the_script_does_not_reach_the_captured_step(made: Path, tmp_path: Path, case: str) -> None:
    text, told = UNLIKE[case]
    shutil.copy(capture_of(made), tmp_path / "c.safetensors")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    (tmp_path / "weights.pt").touch()
    result = start(tmp_path, "replay", "c.safetensors")
    assert (result.code, result.stdout) == (2, "")
    assert told in " ".join(result.stderr.split())
    assert case != "nothing left to do" or "--script 'SCRIPT ARGS...'" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_a_captured_loss_is_replayed_despite_an_added_model_call_after_the_loss(made: Path, tmp_path: Path) -> None:
    shutil.copy(capture_of(made), tmp_path / "c.safetensors")
    other = scripts.PLAIN.replace("F.cross_entropy(net(x), target)", "F.cross_entropy(net(x), target) + net(x).mean()")
    (tmp_path / "train.py").write_text(other, encoding="utf-8")
    result, record = run_on_capture(tmp_path, "replay", tmp_path / "c.safetensors")
    assert (result.code, record.investigations[0].reproduced) == (1, 5)
    assert first_finding(record)[:3] == ("forward-overflow", 0, "attention")


@pytest.mark.slow
def test_a_restarted_script_runs_no_code_after_the_captured_step(made: Path, tmp_path: Path) -> None:
    shutil.copy(capture_of(made), tmp_path / "c.safetensors")
    text = scripts.PLAIN.replace("    main(float", "    try:\n        main(float")
    (tmp_path / "train.py").write_text(
        f"{text}    finally:\n        open('after', 'w')\nimport atexit; atexit.register(open, 'end', 'w')",
        encoding="utf-8",
    )
    assert start(tmp_path, "replay", "c.safetensors").code == 1
    assert not (tmp_path / "after").exists()
    assert not (tmp_path / "weights.pt").exists()


@pytest.mark.parametrize("option", [("--steps=3",), ("--set", "train.steps=3"), ("--seed=1",)])
def test_bisect_of_a_capture_refuses_config_options(made: Path, option: tuple[str, ...]) -> None:
    result = start(made, "bisect", str(capture_of(made)), *option)
    assert result.code == 2
    assert "which is one recorded step and takes none of them" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("at", ["restarting train.py", "replaying step"])
def test_an_interrupted_replay_exits_with_130_and_records_nothing(at: str, made: Path, tmp_path: Path) -> None:
    errors, _ = interrupted(at, made, tmp_path, "replay")
    assert errors[-1] == "interrupted: nothing was recorded"


TWICE = {
    "Ctrl-C": [(False, signal.SIGINT)],
    "timeout": [(False, signal.SIGTERM), (False, signal.SIGTERM)],
    "a batch system": [(True, signal.SIGTERM), (False, signal.SIGTERM)],
}
"""The signals that end a command, and whether its children get them."""


@pytest.mark.slow
@pytest.mark.parametrize("sender", TWICE)
def test_an_interrupted_search_exits_with_130_and_records_its_trials(sender: str, made: Path, tmp_path: Path) -> None:
    _, stdout = interrupted("trial 1:", made, tmp_path, "bisect", TWICE[sender])
    assert stdout.startswith("! Interrupted")
    record = read_record(tmp_path / "r.json")
    assert record.interrupted
    assert record.trials


def children_of(pid: int) -> list[int]:
    """Returns the child processes of a process, on Linux."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def interrupted(
    at: str, made: Path, temporary: Path, verb: str, signals: Sequence[tuple[bool, int]] = TWICE["Ctrl-C"]
) -> tuple[list[str], str]:
    """Runs a command on the capture, sends signals at a line of its stderr, and returns its stderr lines and stdout."""
    program = [sys.executable, "-m", "ampdbg", verb, str(capture_of(made)), f"--record={temporary / 'r.json'}"]
    found = environment(PYTHONPATH=os.pathsep.join(sys.path), TMPDIR=str(temporary))
    child = subprocess.Popen(program, cwd=made, env=found, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    lines = iter(child.stderr.readline, "")
    before = [*itertools.takewhile(lambda line: not line.startswith(at), lines)]
    assert child.poll() is None, before
    if at == "restarting train.py":
        time.sleep(0.5)  # during the imports of the other process
    for is_of_children, number in signals:
        for pid in children_of(child.pid) if is_of_children else [child.pid]:
            os.kill(pid, number)
        time.sleep(0.02)
    stdout, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in errors
    assert [*temporary.glob(f"{TEMPORARY}*")] == []
    return errors.splitlines(), stdout
