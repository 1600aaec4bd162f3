"""A line whose input was rounded too early: the patch is placed where the value is made, in any kind of code."""

import textwrap
from pathlib import Path

import pytest

from ampdbg.record.file import read_record
from tests.commands.program import start
from tests.script import scripts
from tests.script.test_run import captured, run_with_page
from tests.siblings import slow_except

SPOILT = {
    "tanh": ("y = torch.tanh(h * 4)", "out = torch.log(1 - y * y + 1e-8)"),
    "tanh of a cast by hand": ("y = torch.tanh((h.float() * 4).half())", "out = torch.log(1 - y * y + 1e-8)"),
    "softmax": ("p = (h * 8).softmax(-1).to(h.dtype)", "rest = 1 - p", "out = torch.log(rest + 1e-8)"),
    "mean": ("x = h * 1e-3 + 100", "d = x - x.mean(0)", "var = (d * d).mean(0)", "out = d / torch.sqrt(var + 1e-8)"),
    "cast": ("h = h.float()", "h = h.half()", "y = torch.tanh(h * 4)", "out = torch.log(1 - y * y + 1e-8)"),
}
"""Each makes ``out`` from the half ``h``: a value near 1, or one beside a large mean, is rounded too early."""

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        {inside}

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
for step in range(3):
    x = torch.randn(32, 16).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        {outside}
        loss = out.float().mean()
    STEP
"""
FUNCTION = "def head(h):\n    {lines}\n    return out\n"
PLACES = {
    "the loop": ("", "return h", "h = net(x)\n{lines}"),
    "a function": (FUNCTION, "return h", "h = net(x)\nout = head(h)"),
    "a forward": ("", "{lines}\nreturn self.b(out.float())", "out = net(x)"),
    "a library": ("from site_packages.head import head\n", "return h", "h = net(x)\nout = head(h)"),
    "a library that a forward calls": (
        "from site_packages.head import head\n",
        "out = head(h)\nreturn self.b(out.float())",
        "out = net(x)",
    ),
}


def script(kind: str, place: str, *, is_healthy: bool = False) -> str:
    """Returns a script that makes ``kind`` in ``place``; the healthy twin keeps ``h`` and the rest in FP32."""
    lines = "\n".join(SPOILT[kind])
    if is_healthy:
        lines = "h = h.float()\n" + lines.replace(".half()", ".float()")
    functions, inside, outside = (part.replace("{lines}", lines) for part in PLACES[place])
    if functions.startswith("def"):
        functions = FUNCTION.replace("{lines}", textwrap.indent(lines, "    ").lstrip())
    deep = textwrap.indent(inside, " " * 8).lstrip(), textwrap.indent(outside, " " * 8).lstrip()
    return scripts.loop(functions + NET.replace("{inside}", deep[0]).replace("{outside}", deep[1]))


def library(folder: Path, kind: str) -> None:
    """Writes the function into an installed package."""
    file = folder / "site-packages" / "head.py"
    file.parent.mkdir()
    file.write_text("import torch\n\n" + FUNCTION.replace("{lines}", "\n    ".join(SPOILT[kind])))
    (folder / "site_packages").symlink_to(file.parent)


EDITS = {
    ("tanh of a cast by hand", "the loop"): ["y = torch.tanh((h.float() * 4).float())"],
    ("tanh of a cast by hand", "a forward"): ["y = torch.tanh((h.float() * 4).float())"],
    ("tanh", "a function"): ["y = torch.tanh(h.float() * 4)", "out = torch.log(1 - y * y + 1e-8)"],
    ("mean", "a forward"): ["x = h.float() * 1e-3 + 100"],
    ("cast", "the loop"): ["h = h.float()"],
    ("softmax", "a function"): [
        "h = h.float()",
        "p = (h * 8).softmax(-1).to(h.dtype)",
        "rest = 1 - p",
        "out = torch.log(rest + 1e-8)",
    ],
    ("tanh", "a library"): ["out = head(h.float())"],
    ("tanh", "a library that a forward calls"): ["out = head(h.float())"],
}
QUICK = [("tanh of a cast by hand", "the loop"), ("tanh", "a function")]


@pytest.mark.parametrize("case", slow_except(QUICK, list(EDITS)), ids=" in ".join)
def test_suggest_fp32_patches_the_place_that_rounds_a_value_too_early(case: tuple[str, str], tmp_path: Path) -> None:
    kind, place = case
    library(tmp_path, kind)
    record, _, _ = run_with_page(tmp_path, script(kind, place))
    assert (record.verdict, record.findings[0].code) == ("precision", "eps-underflow")
    suggested = start(tmp_path, "suggest-fp32", *captured(record)[:1], "--record", "patched.json")
    assert suggested.code == 0, suggested.stderr
    added = [line[1:].strip() for line in suggested.stdout.splitlines() if line.startswith("+") and line[1] != "+"]
    assert [line for line in added if "autocast" not in line] == EDITS[case]
    found = read_record(tmp_path / "patched.json")
    assert found.verification is not None
    assert found.verification.passed


OVERLAP = """
def overlap(a, b):
    return a.minimum(b).prod(-1) / (a[:, 0] * a[:, 1] + b[:, 0] * b[:, 1])
"""
BOXES = scripts.loop("""
from site_packages.head import overlap

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for step in range(12):
    x, cells = torch.randn(32, 16).cuda(), torch.rand(32, 2).cuda() * 30 + 2
    with torch.autocast("cuda", dtype=torch.float16):
        boxes = net(x).sigmoid() * 640
        kind = boxes.dtype
        shared = overlap(boxes, GIVEN)
        loss = (1 - shared.float()).mean()
    STEP
""")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "cast"),
    [("(cells * 8).half()", "(cells * 8).float()"), ("(cells * 8).to(kind)", "(cells * 8).to(kind).float()")],
)
def test_every_half_argument_of_a_library_call_is_cast_by_the_proven_patch(
    given: str, cast: str, tmp_path: Path
) -> None:
    library(tmp_path, "tanh")
    (tmp_path / "site-packages" / "head.py").write_text(OVERLAP)
    record, _, _ = run_with_page(tmp_path, BOXES.replace("GIVEN", given))
    assert (record.verdict, record.findings[0].code) == ("precision", "silent-overflow")
    suggested = start(tmp_path, "suggest-fp32", *captured(record)[:1], "--record", "patched.json")
    assert suggested.code == 0, suggested.stderr
    added = [line[1:].strip() for line in suggested.stdout.splitlines() if line.startswith("+") and line[1] != "+"]
    assert added[1:] == [f"shared = overlap(boxes.float(), {cast})"]


@pytest.mark.slow
def test_a_library_call_with_float32_arguments_is_healthy(tmp_path: Path) -> None:
    library(tmp_path, "tanh")
    (tmp_path / "site-packages" / "head.py").write_text(OVERLAP)
    text = BOXES.replace("overlap(boxes, GIVEN)", "overlap(boxes.float(), cells * 8)")
    record, _, code = run_with_page(tmp_path, text)
    assert (record.verdict, code) == ("healthy", 0)


@pytest.mark.parametrize("kind", slow_except(["tanh"], list(SPOILT)))
def test_a_value_that_is_made_in_fp32_is_healthy(kind: str, tmp_path: Path) -> None:
    record, _, code = run_with_page(tmp_path, script(kind, "the loop", is_healthy=True))
    assert (record.verdict, code) == ("healthy", 0)
