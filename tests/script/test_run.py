"""``ampdbg run`` on unchanged scripts: its findings, and that scripts run and end as without ampdbg."""

import gzip
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import optimizer as torchs

import ampdbg
from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from ampdbg.script.launch import Script, run_script
from tests.commands.program import Result, environment, start, start_python
from tests.script import scripts
from tests.siblings import slow_except

FORKS = "import os\nif os.fork() == 0:\n    raise SystemExit(9)\nassert os.wait()[1] >> 8 == 9"


def run(folder: Path, text: str, *arguments: str, options: tuple[str, ...] = ("--emulate",)) -> tuple[Result, Record]:
    """Runs a script of this text with ampdbg and reads its record."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    result = start(folder, "run", *options, "--record=r.json", "train.py", *arguments)
    assert (folder / "r.json").exists(), result.stderr
    return result, read_record(folder / "r.json")


def run_with_page(
    folder: Path, text: str, *arguments: str, options: tuple[str, ...] = ("--emulate",)
) -> tuple[Record, str, int]:
    """Runs a script of this text; returns its record, the text of its page and its exit code."""
    result, record = run(folder, text, *arguments, options=options)
    return record, " ".join(result.stderr.split()), result.code


def first_finding(record: Record) -> tuple[str, int | None, str, str]:
    """The code, step, module and line of the first finding."""
    found = record.findings[0]
    return found.code, found.step, found.module, found.source.text if found.source else ""


def captured(record: Record) -> list[str]:
    """The captures of a run, in order."""
    assert record.script is not None
    return list(record.script.captures)


def steps_captured(record: Record) -> list[int]:
    """The steps that a run has captured."""
    return [int(path.rpartition("-step-")[2].partition(".")[0]) for path in captured(record)]


def assert_unwatched_saves_the_same(folder: Path, *arguments: str) -> None:
    """Asserts that the unwatched script saves the same bytes as the run before."""
    watched = (folder / "net.pt").read_bytes()
    (folder / "net.pt").unlink()
    start(folder, "run", "--emulate", "--no-watch", "train.py", *arguments)
    assert (folder / "net.pt").read_bytes() == watched


def alone(folder: Path, *arguments: str) -> str:
    """Returns the output of a script with the same arguments, without ampdbg."""
    code = f"import runpy, sys; sys.argv = {[*arguments]}; sys.path.insert(0, ''); runpy.run_path(sys.argv[0], None, "
    ended = start_python(folder, f"{code}'__main__')")
    assert ended.code == 0, ended.stderr
    return ended.stdout


def by_python(folder: Path, *arguments: str) -> str:
    """Returns the output of a new Python process with these arguments."""
    program = [sys.executable, *arguments]
    found = environment(PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run(program, check=True, cwd=folder, env=found, capture_output=True, text=True).stdout


def test_a_healthy_script_has_no_findings_and_no_captures(tmp_path: Path) -> None:
    result, record = run(tmp_path, scripts.PLAIN, "1", "6")
    assert (result.code, record.verdict, record.steps_run, record.findings) == (0, "healthy", 6, ())
    assert record.environment.emulated is (record.environment.device == "cpu")
    assert "No fault found: none of 6 steps skipped; no step was compared with FP32." in result.stderr
    assert not (tmp_path / ".ampdbg" / "captures").exists()
    assert result.stdout.startswith("weights ")


@pytest.mark.slow
def test_weights_and_output_are_the_same_as_without_ampdbg(tmp_path: Path) -> None:
    result, _ = run(tmp_path, scripts.PLAIN, "1", "5", options=("--fail-on=never",))
    watched = (tmp_path / "weights.pt").read_bytes()
    assert (result.code, result.stdout) == (0, alone(tmp_path, "train.py", "1", "5"))
    assert (tmp_path / "weights.pt").read_bytes() == watched


OPEN_FILES = """\
import csv, gzip, torch
import rich

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)

torch.manual_seed(0)
log = open("log.csv", "w")
rows, zipped = csv.writer(log), gzip.open("log.gz", "wt")
net = Net(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = net(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    rows.writerow([step, loss.item()])
    zipped.write(f"{step}\\n")
if WITH_ERROR:
    raise ValueError("here")
"""

OPEN_MODULE = """\
def write(text):
    held.write(text)

held = open("own.txt", "w")
write("by a module of a name that ampdbg uses")
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("option", ["--watch", "--no-watch"])
def test_files_that_a_script_leaves_open_are_flushed_at_its_end(option: str, fails: bool, tmp_path: Path) -> None:
    folders = []
    for name in ("alone", "run"):
        folder = tmp_path / name
        (folder / "code").mkdir(parents=True)
        (folder / "code" / "rich.py").write_text(OPEN_MODULE, encoding="utf-8")
        (folder / "code" / "train.py").write_text(OPEN_FILES.replace("WITH_ERROR", str(fails)), encoding="utf-8")
        ours = () if name == "alone" else ("-m", "ampdbg", "run", option)
        program = [sys.executable, *ours, "code/train.py"]
        ended = subprocess.run(program, check=False, cwd=folder, env=environment(), capture_output=True, timeout=120)
        assert ended.returncode == int(fails)
        zipped = gzip.decompress((folder / "log.gz").read_bytes())
        folders.append([(folder / "log.csv").read_bytes(), zipped, (folder / "own.txt").read_bytes()])
    assert folders[0] == folders[1]
    assert all(folders[0])


SCRIPTED = scripts.loop("""
warnings.simplefilter("ignore")
net = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).cuda())
with torch.no_grad():
    for parameter in net.parameters():
        parameter.mul_(float(sys.argv[1]))
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cuda")
for step in range(3):
    x = torch.ones(4, 8)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x.cuda()).float().square().mean()
    STEP
print("done")
""")


@pytest.mark.parametrize("gain", slow_except(["2000"], ["1", "2000"]))
def test_a_fully_scripted_model_trains_and_its_overflow_is_found(gain: str, tmp_path: Path) -> None:
    code = int(gain != "1")
    result, record = run(tmp_path, SCRIPTED, gain)
    assert (result.code, result.stdout, record.steps_run) == (code, "done\n", 3)
    assert [finding.code for finding in record.findings] == ["forward-overflow"] * code


HEALTHY = {
    "a line of the script": scripts.LOSS_LINE.replace("GAIN", "1.0"),
    "a model in a function": scripts.ONE_MODULE.replace("GAIN", "0.1"),
    "a GAN": scripts.GAN.replace("GAIN", "1.0"),
    "three turns": scripts.ALTERNATING.replace("GAIN", "1.0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY)
def test_scripts_of_other_kinds_are_healthy_without_an_overflow(tmp_path: Path, case: str) -> None:
    result, record = run(tmp_path, HEALTHY[case])
    assert (result.code, record.verdict, record.findings) == (0, "healthy", ())
    assert case != "a model in a function" or record.groups == ("group 0",)
    assert not any(group.parameters for step in record.steps for group in step.groups)


@pytest.mark.slow
def test_parameter_names_of_a_gan_name_the_failing_generator(tmp_path: Path) -> None:
    _, record = run(tmp_path, scripts.GAN.replace("GAIN", "1e9"))
    named = {one.name.partition(".")[0] for step in record.steps for group in step.groups for one in group.parameters}
    assert named == {"netG"}


UNSETTLED = ("it has not settled yet",)
SETTLED = ("settled at 256, ", "loss scale 65,536 to 256 ")
SETTLES = {
    "alone": (scripts.CALIBRATION, SETTLED),
    "before an unscaled loop": (scripts.CALIBRATION + scripts.UNSCALED, SETTLED),
    "in each fold": (scripts.FOLDS.replace("BREAKS", "pass"), ()),
    "not before the run ends": (scripts.CALIBRATION.replace("range(30)", "range(7)"), UNSETTLED),
}
"""The scripts in which a scale settles, and the text on the page."""


@pytest.mark.slow
@pytest.mark.parametrize("how", SETTLES)
def test_a_settling_scale_is_info_with_the_final_scale_of_its_own_loop(tmp_path: Path, how: str) -> None:
    text, says = SETTLES[how]
    record, page, code = run_with_page(tmp_path, text)
    assert (code, record.verdict) == (0, "healthy" if says != UNSETTLED else "inconclusive")
    assert [(found.code, found.severity) for found in record.findings] == [("scale-calibration", "info")]
    assert says != SETTLED or record.findings[0].evidence["scale"] == 256.0
    assert all(one in page for one in says)


AT_ONE = scripts.loop("""
net = nn.Linear(4, 1, bias=False).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
scaler = torch.amp.GradScaler("cuda", init_scale=FIRST)
for _ in range(6):
    with torch.autocast("cuda"):
        loss = net(torch.ones(1, 4, device="cuda")).float().sum() * 1e5
    STEP
""")
"""The gradients overflow FP16 at a loss scale of 1, but not at 0.5."""


@pytest.mark.parametrize(("first", "found"), [("1.0", ["gradient-overflow"]), ("0.5", [])])
def test_a_step_that_fails_at_a_loss_scale_of_1_is_captured_though_0_5_would_work(
    tmp_path: Path, first: str, found: list[str]
) -> None:
    result, record = run(tmp_path, AT_ONE.replace("FIRST", first))
    assert [one.code for one in record.faults if one.op] == found
    assert steps_captured(record) == [0] * len(found)
    assert ("ampdbg suggest-fp32" in result.stderr) is bool(found)


@pytest.mark.slow
def test_a_collapse_after_a_settled_scale_is_blamed_on_the_failing_line(tmp_path: Path) -> None:
    steep = "h = net[0](x); loss = loss + (h - h.detach()).float().sum() * 1e8"
    _, record = run(tmp_path, scripts.FOLDS.replace("BREAKS", steep))
    assert (*first_finding(record)[:2], first_finding(record)[3]) == ("gradient-overflow", 103, steep)


@pytest.mark.slow
def test_divergence_from_a_high_learning_rate_is_not_a_precision_fault(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, scripts.DIVERGING)
    assert (code, record.verdict) == (1, "other")
    assert [(found.code, found.step, found.root) for found in record.findings] == [
        ("divergence", 2, None),
        ("scale-collapse", 2, 0),
    ]
    assert "Remedy: lower the learning rate, warm up, or clip gradients; no precision helps" in page


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_autocast_for_cuda_without_a_gpu_is_reported_as_not_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result, record = run(tmp_path, scripts.PLAIN, "400", "3", options=())
    assert (result.code, [found.code for found in record.findings]) == (1, ["not-half"])
    assert "ampdbg run --emulate train.py 400 3" in result.stderr


IN_FP32 = scripts.loop("""
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=sys.argv[1] == "on")
for step in range(3):
    loss = net(torch.randn(8, 8)).square().mean() * float(sys.argv[2])
    print(loss.item())
    STEP
""")


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize(("scaler", "found"), [("on", ["not-half"]), ("off", [])])
@pytest.mark.parametrize("factor", ["1", pytest.param("8", marks=pytest.mark.slow)])
def test_fp32_training_is_reported_only_if_its_script_enables_a_scaler(
    scaler: str, found: list[str], factor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result, record = run(tmp_path, IN_FP32, scaler, factor, options=())
    assert (result.code, [one.code for one in record.findings]) == (len(found), found)
    assert record.asked == ({"GradScaler": "on"} if found else {})
    assert {step.scale for step in record.steps} == {1.0}  # a batch size is no loss scale
    assert record.steps[0].loss == pytest.approx(float(result.stdout.split()[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "verdict"), [("y.square()", "healthy"), ("y.log()", "other")])
def test_the_page_of_an_fp32_script_says_that_fp32_was_used(tmp_path: Path, loss: str, verdict: str) -> None:
    result, record = run(tmp_path, scripts.FP32.replace("LOSS", loss), options=())
    assert (record.verdict, record.environment.policy) == (verdict, "none")
    said = " ".join(result.stderr.split())
    assert "in FP32" in said
    if verdict == "healthy":
        assert "no step that ampdbg examined ran in half precision" in said
    else:
        assert first_finding(record) == ("true-nan", 0, "", "loss = y.log().mean()")
        assert record.findings[0].op == "aten.log.default"
        assert "fails in every precision: the mathematics is wrong, not the precision" in said
        assert "precision.level" not in said


@pytest.mark.parametrize("gain", slow_except(["1e3"], ["1.0", "1e3"]))
@pytest.mark.parametrize("loop", slow_except(list(scripts.LOOPS)[:2], scripts.LOOPS))
def test_a_replayed_step_leaves_output_and_weights_unchanged(tmp_path: Path, loop: str, gain: str) -> None:
    result, record = run(tmp_path, scripts.LOOPS[loop].replace("GAIN", gain), options=("--emulate", "--fail-on=never"))
    watched = (tmp_path / "weights.pt").read_bytes()
    bare = start(tmp_path, "run", "--emulate", "--no-watch", "train.py")
    assert (result.code, bare.code, result.stdout) == (0, 0, bare.stdout)
    assert (tmp_path / "weights.pt").read_bytes() == watched
    if gain == "1.0":
        assert (record.verdict, record.findings) == ("healthy", ())
    else:
        assert (record.verdict, *first_finding(record)[:3:2]) == ("precision", "forward-overflow", "3")
        assert record.findings[0].op == "aten.mm.default"
        assert first_finding(record)[3].startswith("similar = ")
        made = record.investigations[0]
        low, fp32, bfloat16 = made.low, made.fp32, made.wide
        assert fp32 is not None
        assert bfloat16 is not None
        assert (low.dtype, fp32.dtype, bfloat16.dtype) == ("float16", "float32", "bfloat16")
        assert math.isfinite(fp32.loss + fp32.grad_norm + bfloat16.loss)
        assert "the script waits while ampdbg replays it" in result.stderr


def test_the_record_is_in_the_start_folder_and_inconclusive_without_an_optimizer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nos.mkdir('out')\nos.chdir('out')\nprint(os.getcwd())", encoding="utf-8"
    )
    result = start(tmp_path, "run", "train.py")
    assert (result.code, result.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert [folder.name for folder in tmp_path.rglob(".ampdbg")] == [".ampdbg"]
    assert read_record(tmp_path / ".ampdbg" / "latest.json").verdict == "inconclusive"


def test_a_meta_model_and_an_unhashable_optimizer_are_healthy(tmp_path: Path) -> None:
    result, record = run(tmp_path, scripts.ODD)
    assert (result.code, result.stdout, record.verdict, record.steps_run) == (0, "tried out\n", "healthy", 4)


ENDINGS = {
    "raises": ("def f():\n    raise ValueError('bad')\nf()", 1, "ValueError: bad\n"),
    "syntax": ("x = (", 1, "SyntaxError"),
    "at once": ("import os\nos._exit(5)", 5, ""),
    "fork": (FORKS, 0, ""),
}


@pytest.mark.parametrize("how", slow_except(["raises", "at once", "fork"], ENDINGS))
def test_a_script_ends_with_its_own_exit_code_and_error(tmp_path: Path, how: str) -> None:
    text, code, says = ENDINGS[how]
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    result = start(tmp_path, "run", "--quiet", "train.py")
    assert (result.code, result.stdout) == (code, "")
    assert says in result.stderr
    assert "ampdbg" not in result.stderr.replace(str(tmp_path), "")


WARNED = """\
import torch, warnings
net = torch.nn.Linear(2, 2)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.ones(2, 2)).sum()
        schedule.step()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    schedule.step(epoch=3)
    warnings.warn("my own")
for warning in warned:
    if warning.category is UserWarning:
        print(warning.filename.rpartition("/")[2], warning.lineno, str(warning.message)[:30])
"""


@pytest.mark.slow
def test_warnings_name_the_same_lines_as_without_ampdbg(tmp_path: Path) -> None:
    result, _ = run(tmp_path, WARNED, options=())
    assert result.stdout == alone(tmp_path, "train.py")
    assert [said in result.stdout for said in (" Detected call", " The epoch", "train.py 15 my own")] == [True] * 3


SHOWN_ONCE = scripts.loop("""
net = torch.nn.Linear(2, 2)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cuda", init_scale=2.0)
for _ in range(3):
    warnings.warn("my own", FutureWarning)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(torch.ones(2, 2)).sum()
    STEP
""")


def test_a_warning_that_python_shows_once_is_shown_once(tmp_path: Path) -> None:
    result, record = run(tmp_path, SHOWN_ONCE)
    assert record.steps_run == 3
    assert result.stderr.count("FutureWarning: my own") == 1


BY_KEYWORD = scripts.loop("""
net = nn.Linear(16, 4).cuda()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
for step in range(6):
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        out = net(input=torch.randn(8, 16, device="cuda")) * (1e6 if step == 3 else 1.0)
        loss = F.mse_loss(input=out.float(), target=torch.zeros(8, 4, device="cuda"))
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(outputs=loss).backward(gradient=None)
    scaler.unscale_(optimizer=optimizer)
    nn.utils.clip_grad_norm_(parameters=net.parameters(), max_norm=1.0)
    scaler.step(optimizer=optimizer)
    scaler.update(new_scale=None)
""")


def test_calls_with_keyword_arguments_are_watched(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, BY_KEYWORD)
    assert (record.steps_run, record.steps_skipped, record.unseen.notes) == (6, 1, ())
    assert first_finding(record)[:2] == ("forward-overflow", 3)
    assert "out = net(input=" in first_finding(record)[3]


WARNS_EACH_TIME = scripts.loop("""
warnings.simplefilter("always")
net = nn.Linear(16, 4).cuda()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cuda")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x):
        warnings.warn("my own")
        return self.net(x) * 300 * 300

model = Model()
for step in range(5):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 16, device="cuda") * (100.0 if step == 2 else 1e-3)).float().square().mean() * 1e-9
    STEP
""")


def test_a_replay_does_not_repeat_the_warnings_of_its_step(tmp_path: Path) -> None:
    result, record = run(tmp_path, WARNS_EACH_TIME)
    assert [made.step for made in record.investigations] == [2]
    assert result.stderr.count("UserWarning: my own") == record.steps_run == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing.py",), "nothing.py: there is no such file; needed: a Python file, or -m and the name of a module"),
        ((".",), ".: is a folder"),
        (("/dev/zero",), "/dev/zero: is a device; needed: a Python file"),
        (("data.bin",), "data.bin: is larger than 67,108,864 bytes; needed: a Python file"),
        (("-m", "no.such"), "-m no.such: there is no such module"),
        (("torchrun", "train.py"), "start ampdbg inside it: torchrun --no-python ampdbg run train.py"),
        (("python", "train.py"), "start ampdbg inside it: ampdbg run train.py"),
    ],
)
def test_run_refuses_a_non_script_target_with_a_hint(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    with open(tmp_path / "data.bin", "wb") as data:
        data.truncate(2**35)
    result = start(tmp_path, "run", *arguments)
    assert (result.code, says in result.stderr) == (2, True)
    assert not (tmp_path / ".ampdbg").exists()


OWN = ("yaml", "typer", "tqdm", "rich")
"""Modules that ampdbg or torch has loaded when the script starts, and modules that ampdbg loads afterwards."""


@pytest.mark.slow
@pytest.mark.parametrize("how", [("train.py",), ("-m", "train")], ids=["file", "module"])
@pytest.mark.parametrize("has_own", [True, False])
def test_modules_beside_the_script_take_precedence_over_modules_of_ampdbg(
    has_own: bool, how: tuple[str, ...], tmp_path: Path
) -> None:
    for name in OWN if has_own else ():
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    (tmp_path / "numpy").mkdir()  # an installed package precedes a mere folder
    text = f"import numpy, {', '.join(OWN)}\nprint(numpy.__file__, {', '.join(f'{one}.__file__' for one in OWN)})"
    (tmp_path / "train.py").write_text(scripts.CALIBRATION + text, encoding="utf-8")
    program = tmp_path / "bin" / "program.py"  # as pip installs it, in a folder without modules
    program.parent.mkdir()
    program.write_text("from ampdbg.__main__ import main\nmain()", encoding="utf-8")
    printed = by_python(tmp_path, str(program), "run", "--quiet", "--emulate", "--record=r.json", *how)
    assert read_record(tmp_path / "r.json").verdict == "healthy"
    assert printed == by_python(tmp_path, "-c", text)
    assert printed.count(str(tmp_path)) == len(OWN) * has_own


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "sys.path[:] = [None, 3]; raise SystemExit(3)"])
def test_modules_that_the_script_hides_are_restored_however_the_script_ends(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded() -> dict[str, object]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "pluggy"}

    (tmp_path / "pluggy.py").write_text("own = True", encoding="utf-8")
    (tmp_path / "train.py").write_text(f"import sys, pluggy\nassert pluggy.own\n{ending}", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = loaded()
    assert len(before) > 1
    assert run_script(Script(str(tmp_path / "train.py"))).code == 3
    assert loaded() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["named_buffers", "modules"])
def test_a_script_that_breaks_nn_module_trains_to_its_end_and_the_watcher_fails(tmp_path: Path, name: str) -> None:
    text = scripts.PLAIN.replace("        x = torch", f"        nn.Module.{name} = None\n        x = torch")
    result, record = run(tmp_path, text, "400", "6")
    unwatched = start(tmp_path, "run", "--emulate", "--no-watch", "train.py", "400", "6")
    assert result.stdout == unwatched.stdout != ""
    assert "Traceback" not in result.stderr
    assert "because it failed itself" in record.error
    assert "ampdbg itself failed after" in " ".join(result.stderr.split())


NAMELESS = scripts.loop("""
class Net(nn.Module):
    is_broken = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        made = self.linear(x)
        if Net.is_broken:
            made = nn.functional.binary_cross_entropy(made.sigmoid(), torch.zeros_like(made))
        return made

    def named_modules(self, *args, **kwargs):
        if Net.is_broken:
            raise RuntimeError("no modules today")
        return super().named_modules(*args, **kwargs)

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    Net.is_broken = step == 3
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.ones(3, 4, device="cuda")).float().pow(2).mean()
    STEP
""")


def test_an_autocast_error_is_named_even_if_named_modules_raises(tmp_path: Path) -> None:
    result, record = run(tmp_path, NAMELESS)
    line = "made = nn.functional.binary_cross_entropy(made.sigmoid(), torch.zeros_like(made))"
    assert first_finding(record) == ("misuse-bce", 3, "", line)
    assert len(record.steps) == 3
    assert "no modules today (train.py, line 22)" in record.error
    assert "ampdbg itself failed with" not in result.stderr


TRACED_ENDINGS = {
    "to its end": "",
    "with an error while a step is traced": "raise ValueError('bad')",
    "with a code while a step is traced": "raise SystemExit(3)",
    "by an interrupt while a step is traced": "raise KeyboardInterrupt",
}


def replaced_by_a_run() -> list[object]:
    """The functions, hooks and process state that a run replaces."""
    scaler, cuda = torch.amp.GradScaler, torch.cuda
    functions = [scaler.scale, scaler.step, scaler.update, vars(torch.autograd)["_engine_run_backward"]]
    functions += [torch.Tensor.cuda, torch.optim.Optimizer.__init__]
    functions += [cuda.is_available, cuda.device_count, cuda.get_rng_state_all]
    of_steps = (torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks)
    hooks = [*map(id, of_steps), *(len(each.values()) for each in of_steps), torch._C._len_torch_dispatch_stack()]
    process = [sys.argv, sys.path[:], sys.modules["__main__"], signal.signal, signal.getsignal]
    process += [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    return [*functions, *hooks, *process]


@pytest.mark.parametrize("how", slow_except(["to its end", "with a code while a step is traced"], TRACED_ENDINGS))
def test_a_run_restores_torch_and_the_process(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ending = TRACED_ENDINGS[how]
    text = scripts.LOSS_LINE.replace("GAIN", "1000.0")
    text = text.replace("for _ in range(7):", "sys.modules['held'] = net\nfor step in range(7):")
    (tmp_path / "train.py").write_text(f"{text}    if step == 1:\n        {ending or 'pass'}\n", encoding="utf-8")
    before = replaced_by_a_run()
    record = ampdbg.run(tmp_path / "train.py", emulate=True)
    assert replaced_by_a_run() == before
    model = sys.modules.pop("held")
    assert isinstance(model, torch.nn.Module)
    modules = list(model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert record.steps_run == (2 if ending else 7)
    assert record.interrupted is ("KeyboardInterrupt" in ending)
    assert ("ValueError: bad" in capfd.readouterr().err) is ("ValueError" in ending)
