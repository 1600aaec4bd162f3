"""Half weights as edits: the line that makes the weights half, and the line that replaces it."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ampdbg.patch.half_weights import (
    AUTOCAST,
    HalfLines,
    WeightEdits,
    beta2_lowered,
    norms_in_float32,
    weights_in_float32,
)
from ampdbg.probes.half_weights import HalfWeights, LoopLines

HEAD = "import torch\nfrom torch import nn\n\n"
LOOP = """optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    loss = model(torch.ones(2, 4).to(next(model.parameters()).dtype)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
IN_AUTOCAST = LOOP.replace(
    "    loss = model", '    with torch.autocast("cpu", dtype=torch.bfloat16):\n        loss = model'
)

NET = """class Net(nn.Sequential):
    def __init__(self, dtype):
        super().__init__(nn.Linear(4, 4, dtype=dtype))

"""

LIBRARY = """
import torch
from torch import nn

class Auto:
    @classmethod
    def from_pretrained(cls, name, dtype="auto"):
        return nn.Linear(4, 4, dtype=torch.bfloat16 if dtype in ("auto", "bfloat16") else dtype)

class Accelerator:
    def __init__(self, cpu=False, mixed_precision=None):
        pass

    def backward(self, loss):
        loss.backward()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a script, next to a small installed library ``accelerate``."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "accelerate.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setitem(sys.modules, "accelerate", None)  # teardown restores the previous state
    del sys.modules["accelerate"]
    return tmp_path


def edits_of(folder: Path, text: str) -> WeightEdits:
    """Runs a script with this text, and returns its edits."""
    file = folder / "train.py"
    file.write_text(text, encoding="utf-8")
    try:
        with HalfWeights() as notes:
            names = runpy.run_path(str(file))
    finally:
        torch.set_default_dtype(torch.float32)
    lines = HalfLines(notes.casts(names["model"].parameters()), notes.loop, notes.is_lowered, (), (str(file),))
    return WeightEdits(lines)


def edited(edits: WeightEdits) -> str:
    """The text of the edited script."""
    (edit,) = edits.made()
    return edit.after.decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model = nn.Linear(4, 4).bfloat16()\n", "model = nn.Linear(4, 4)\n"),
        ("model = nn.Linear(4, 4).to('cpu').half()\n", "model = nn.Linear(4, 4).to('cpu')\n"),
        ("model = nn.Linear(4, 4)\nmodel.bfloat16()\n", "model = nn.Linear(4, 4)\nmodel.float()\n"),
        ("model = nn.Linear(4, 4)\nmodel = model.bfloat16()\n", "model = nn.Linear(4, 4)\nmodel = model.float()\n"),
        (
            "model = nn.Linear(4, 4)\nfor p in model.parameters():\n    p.data = p.data.to(dtype=torch.bfloat16)\n",
            "model = nn.Linear(4, 4)\nfor p in model.parameters():\n    p.data = p.data.to(dtype=torch.float32)\n",
        ),
        (
            "model = nn.Linear(4, 4, bias=False)\nmodel.weight.data = model.weight.data.bfloat16()\n",
            "model = nn.Linear(4, 4, bias=False)\nmodel.weight.data = model.weight.data.float()\n",
        ),
        ("model = nn.Linear(4, 4).to('cpu', torch.bfloat16)\n", "model = nn.Linear(4, 4).to('cpu', torch.float32)\n"),
        (
            "dtype = torch.bfloat16\nmodel = nn.Linear(4, 4, dtype=dtype)\n",
            "dtype = torch.bfloat16\nmodel = nn.Linear(4, 4, dtype=torch.float32)\n",
        ),
        (
            "torch.set_default_dtype(torch.bfloat16)\nmodel = nn.Linear(4, 4)\n",
            "torch.set_default_dtype(torch.float32)\nmodel = nn.Linear(4, 4)\n",
        ),
        (NET + "model = Net(\n    torch.bfloat16\n)\n", NET + "model = Net(\n    torch.float32\n)\n"),
        (
            "from accelerate import Auto\nmodel = Auto.from_pretrained('tiny')\n",
            "from accelerate import Auto\nmodel = Auto.from_pretrained('tiny', dtype=torch.float32)\n",
        ),
        (
            "from accelerate import Auto\nmodel = Auto.from_pretrained('auto', dtype='bfloat16')\n",
            "from accelerate import Auto\nmodel = Auto.from_pretrained('auto', dtype=\"float32\")\n",
        ),
    ],
    ids=[
        "method",
        "chain",
        "statement",
        "assigned",
        "each",
        "data",
        "to",
        "name",
        "default",
        "argument",
        "checkpoint",
        "text",
    ],
)
def test_the_edit_creates_float32_weights_and_runs_the_loop_under_autocast(
    folder: Path, before: str, after: str
) -> None:
    edits = edits_of(folder, HEAD + before + LOOP)
    weights_in_float32(edits)
    assert edited(edits) == HEAD + after + IN_AUTOCAST
    assert edits.refused == []
    assert edits.lowers


@pytest.mark.parametrize(
    ("before", "line", "name"),
    [
        ('kind = getattr(torch, "bfloat16")\nmodel = nn.Linear(4, 4, dtype=kind)\n', 5, "kind"),
        ("def make(kind=torch.bfloat16):\n    return nn.Linear(4, 4, dtype=kind)\n\nmodel = make()\n", 5, "kind"),
        (
            "import types\nargs = types.SimpleNamespace(kind=torch.half)\nmodel = nn.Linear(4, 4).to(args.kind)\n",
            6,
            "args.kind",
        ),
    ],
    ids=["computed", "parameter", "attribute"],
)
def test_a_dtype_that_the_script_is_given_is_named_and_not_edited(
    folder: Path, before: str, line: int, name: str
) -> None:
    edits = edits_of(folder, HEAD + before + LOOP)
    weights_in_float32(edits)
    assert edited(edits) == HEAD + before + IN_AUTOCAST
    told = f"by hand: line {line} of train.py: the script is given {name}; give it torch.float32 instead"
    assert edits.refused == [told]


FABRIC = "import lightning as L\n\ndef setup({}):\n    {}\n    return L.Fabric(devices=1, precision=precision)\n"


@pytest.mark.parametrize(
    ("parameter", "line", "is_given"),
    [
        ("precision=None", 'precision = precision or "bf16-true"', True),
        ("args", "precision = args.precision", True),
        ("", 'precision = "bf16-true"', False),
    ],
    ids=["parameter", "arguments", "literal"],
)
def test_a_librarys_argument_that_the_script_is_given_is_named_and_not_edited(
    tmp_path: Path, parameter: str, line: str, is_given: bool
) -> None:
    file = tmp_path / "train.py"
    file.write_text(FABRIC.format(parameter, line))
    edits = WeightEdits(HalfLines(files=(str(file),)))
    assert edits.add_keywords(AUTOCAST)
    told = 'by hand: line 5 of train.py: the script is given precision; give it "bf16-mixed" instead'
    assert edits.unlowered == [told] * is_given
    after = FABRIC.format(parameter, line).replace("precision=precision)", 'precision="bf16-mixed")')
    assert [edit.after.decode() for edit in edits.made()] == [after] * (not is_given)


def test_steps_by_hand_are_only_those_that_the_patched_script_still_lacks(folder: Path) -> None:
    edits = edits_of(folder, HEAD + "model = nn.Linear(4, 4).bfloat16()\n" + LOOP)
    weights_in_float32(edits)
    edits.refused.append("by hand: line 1")
    lowered = replace(edits.lines, is_lowered=True)
    assert list(edits.by_hand(lowered, are_half=False)) == []
    assert list(edits.by_hand(lowered, are_half=True)) == ["by hand: line 1"]
    (said,) = edits.by_hand(edits.lines, are_half=False)
    assert "an autocast of the script's own is off" in said
    (said,) = edits.by_hand(replace(lowered, outside=(("a.py", 3), ("a.py", 9))), are_half=False)
    assert said.startswith("by hand: line 3 of a.py and line 9 of a.py: the model is called without gradients")


def test_a_call_without_gradients_outside_autocast_is_noted(folder: Path) -> None:
    old = "with torch.no_grad():\n    old = model(torch.ones(2, 4))\n"
    file = folder / "train.py"
    for inside, outside in (("", ((str(file), 6),)), ("    with torch.autocast('cpu'):\n    ", ())):
        file.write_text(HEAD + "model = nn.Linear(4, 4)\n" + old.replace("    old", f"{inside}    old"))
        with HalfWeights() as notes:
            runpy.run_path(str(file))
        assert tuple(notes.outside) == outside


def test_beta2_is_lowered_in_every_file_of_a_large_project(folder: Path) -> None:
    edits = edits_of(folder, HEAD + "model = nn.Linear(4, 4).bfloat16()\n" + LOOP)
    files = [folder / f"part{number}.py" for number in range(40)]
    for file in files:
        file.write_text(f"from torch.optim import Adam\n\ndef {file.stem}(p):\n    return Adam(p, 0.1)\n")
    edits.lines = replace(edits.lines, files=tuple(map(str, files)))
    beta2_lowered(edits)
    assert len(edits.titles) == 40
    assert {edit.after for edit in edits.made()} == {
        file.read_bytes().replace(b"0.1", b"0.1, betas=(0.9, 0.95)") for file in files
    }


def test_a_frozen_model_keeps_its_half_weights(folder: Path) -> None:
    teacher = "teacher = nn.Linear(4, 4).bfloat16()\n"
    edits = edits_of(folder, HEAD + teacher + "model = nn.Linear(4, 4).bfloat16()\n" + LOOP)
    weights_in_float32(edits)
    assert edited(edits) == HEAD + teacher + "model = nn.Linear(4, 4)\n" + IN_AUTOCAST


def test_a_loop_that_already_runs_under_autocast_is_unchanged(folder: Path) -> None:
    edits = edits_of(folder, HEAD + "model = nn.Linear(4, 4).bfloat16()\n" + IN_AUTOCAST)
    weights_in_float32(edits)
    assert edited(edits) == HEAD + "model = nn.Linear(4, 4)\n" + IN_AUTOCAST


def test_a_script_with_accelerate_gets_mixed_precision_and_no_autocast_block(folder: Path) -> None:
    made = "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
    loop = LOOP.replace("loss.backward()", "accelerator.backward(loss)")
    edits = edits_of(folder, HEAD + made + "model = nn.Linear(4, 4).bfloat16()\n" + loop)
    weights_in_float32(edits)
    asked = made.replace("cpu=True", 'cpu=True, mixed_precision="bf16"')
    assert edited(edits) == HEAD + asked + "model = nn.Linear(4, 4)\n" + loop


def test_a_forward_and_backward_pass_in_one_statement_get_an_instruction_and_no_edit(folder: Path) -> None:
    loop = (
        LOOP.replace("    loss = ", "    ").replace(".sum()", ".sum().backward()").replace("    loss.backward()\n", "")
    )
    edits = edits_of(folder, HEAD + "model = nn.Linear(4, 4).bfloat16()\n" + loop)
    weights_in_float32(edits)
    assert edited(edits) == HEAD + "model = nn.Linear(4, 4)\n" + loop
    assert [one.partition(";")[2] for one in edits.unlowered] == [
        ' run what comes before the backward pass in `with torch.autocast("cpu", dtype=torch.bfloat16):`'
    ]


def test_several_statements_on_one_line_stay_on_one_line(folder: Path) -> None:
    several = "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    batch = "    x = torch.ones(2, 4).to(next(model.parameters()).dtype); loss = model(x).sum()\n"
    text = HEAD + "model = nn.Linear(4, 4).bfloat16()\n" + LOOP.splitlines(keepends=True)[0] + "for _ in range(2):\n"
    edits = edits_of(folder, text + batch + several)
    weights_in_float32(edits)
    autocast = '    with torch.autocast("cpu", dtype=torch.bfloat16):\n    '
    assert edited(edits) == text.replace(".bfloat16()", "") + autocast + batch + several


def test_norms_are_made_float32_after_the_cast_to_half(folder: Path) -> None:
    made = "model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()\n"
    edits = edits_of(folder, HEAD + made + LOOP)
    norms_in_float32(edits)
    norms = 'for module in model.modules():\n    if "norm" in type(module).__name__.lower():\n        module.float()\n'
    assert edited(edits) == HEAD + made + norms + IN_AUTOCAST


def test_the_norm_edit_is_refused_if_the_cast_line_does_not_name_the_model(folder: Path) -> None:
    cast = "model = nn.LayerNorm(4)\nfor p in model.parameters():\n    p.data = p.data.bfloat16()\n"
    edits = edits_of(folder, HEAD + cast + LOOP)
    norms_in_float32(edits)
    assert edited(edits) == HEAD + cast + IN_AUTOCAST
    assert [one.partition("py: ")[2] for one in edits.refused] == [
        "the line gives the model no name by which its norms can be made float32"
    ]


def test_assigning_float32_data_is_not_a_cast_and_parameters_keep_no_setattr_hook(folder: Path) -> None:
    cast = "model = nn.Linear(4, 4)\nmodel.weight.data = model.weight.data * 2.0\nmodel.weight.note = 'kept'\n"
    edits = edits_of(folder, HEAD + cast + LOOP)
    assert edits.lines.casts == ()
    assert "__setattr__" not in vars(nn.Parameter)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lr=0.1", "lr=0.1, betas=(0.9, 0.95)"),
        ("lr=0.1,\n", "lr=0.1, betas=(0.9, 0.95),\n"),
        ("betas=(0.8, 0.999)", "betas=(0.8, 0.95)"),
    ],
)
def test_beta2_is_lowered_on_the_line_that_creates_the_optimizer(folder: Path, before: str, after: str) -> None:
    loop = LOOP.replace("SGD(model.parameters(), 0.1)", f"AdamW(model.parameters(), {before})")
    text = HEAD + "model = nn.Linear(4, 4).bfloat16()\n" + loop
    edits = edits_of(folder, text)
    beta2_lowered(edits)
    assert edited(edits) == text.replace(before, after)


TRIES = """
def measured(model):
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    model.zero_grad()

model = nn.Linear(4, 4).bfloat16()
measured(model)
"""


def test_the_training_loop_is_that_of_the_last_backward_pass_before_a_step(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + TRIES + LOOP)
    with HalfWeights() as notes:
        runpy.run_path(str(file))
    assert notes.loop is not None
    lines = file.read_text().splitlines()
    assert lines[notes.loop.first - 1].startswith("    loss = model")
    assert lines[notes.loop.backward - 1] == "    loss.backward()"
    assert str(file) in notes.loop.files


def test_library_calls_get_the_keyword_only_in_files_of_the_loop_if_these_are_known(tmp_path: Path) -> None:
    (train, other) = files = [tmp_path / name for name in ("train.py", "generate.py")]
    for file in files:
        file.write_text("import lightning as L\n\nfabric = L.Fabric(devices=1)\n")
    loop = LoopLines(str(train), 3, 3, frozenset([str(train)]))
    for known, edited in ((loop, [train]), (loop._replace(files=frozenset()), files), (None, files)):
        edits = WeightEdits(HalfLines(loop=known, files=tuple(map(str, files))))
        assert edits.add_keywords(AUTOCAST)
        assert [one.path for one in edits.made()] == edited
    assert other.read_text() == train.read_text()
