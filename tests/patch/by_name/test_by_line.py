"""The helper at the line where a script creates its model: `NAME.in.py` is run, and becomes `NAME.out.py`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ampdbg.patch.by_name import edit_maker
from ampdbg.patch.edits import Edited
from ampdbg.probes.makings import Construction, Constructions
from ampdbg.probes.models import unwrapped
from tests.conftest import Golden
from tests.patch.by_name.test_helper import expanded, folded

FIXTURES = Path(__file__).parents[1] / "fixtures" / "by_line"

Scope = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """The pins of a fixture's model, and how to find the model in the scope of the file."""

    pins: tuple[str, ...] = ("0",)
    find: Callable[[Scope], nn.Module] = lambda scope: scope["model"]


CASES = {
    "top_level": Case(),
    "beside_a_number": Case(),
    "main_block": Case(("layers.0", "head")),
    "attribute": Case(("1",), lambda scope: scope["trainer"].model),
    "compound": Case(("1",), lambda scope: scope["net"]),
    "new_head": Case(("0", "2")),
    "returned": Case(("1",)),
}


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


def run(path: Path, text: bytes) -> tuple[Scope, Constructions]:
    """Runs a script with this text at a path; returns its scope and the recorded makings."""
    scope: Scope = {"__name__": "__main__"}
    with Constructions() as makings:
        exec(compile(text, path, "exec"), scope)
    return scope, makings


def made(name: str, end: str = "in") -> tuple[nn.Module, Construction]:
    case, path = CASES[name], FIXTURES / f"{name}.{end}.py"
    scope, makings = run(path, expanded(path.read_text(encoding="utf-8")).encode())
    model = unwrapped(case.find(scope))
    making = makings.of(model, case.pins)
    assert making is not None
    return model, making


def edited(text: bytes, making: Construction, *pins: str) -> Edited:
    return edit_maker(text, making, pins)


def test_every_fixture_has_a_case() -> None:
    assert {path.name.removesuffix(".in.py") for path in FIXTURES.glob("*.in.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_an_edited_script_equals_its_golden_file(name: str, golden: Golden) -> None:
    _, making = made(name)
    path = FIXTURES / f"{name}.in.py"
    assert making.file == str(path)
    result = edited(path.read_bytes(), making, *CASES[name].pins)
    assert result.refused == ()
    golden(FIXTURES / f"{name}.out.py", folded(result.source.decode(), CASES[name].pins))


@pytest.mark.parametrize("name", CASES)
def test_the_edited_script_creates_the_same_model_with_the_pinned_modules(name: str) -> None:
    (before, _), (after, _) = made(name), made(name, "out")
    assert list(after.state_dict()) == list(before.state_dict())
    pinned = {name for name, module in after.named_modules() if "forward" in vars(module)}
    assert pinned == set(CASES[name].pins)


def test_only_the_model_with_pins_gets_the_call_if_one_line_creates_two_models() -> None:
    text = "from torch import nn\nactor, critic = nn.Sequential(nn.Linear(4, 1)), nn.Linear(4, 1)\n"
    result = edited(text.encode(), Construction("train.py", 2, path="critic"), "0")
    assert result.source.decode().splitlines()[-2:] == [text.splitlines()[-1], "_keep_in_fp32(critic)"]


REFUSED = {
    "one of several": ("model, other = {}, nn.Linear(2, 2)", "no single call there creates the model and names it"),
    "no name": ("print((model := {}))", "no single call there creates the model and names it"),
    "in a list": ("models = [{}]\nmodel = models[0]", "no single call there creates the model and names it"),
    "or another": ("model = {} if True else None", "no single call there creates the model and names it"),
    "in a wrapper": (
        "from tests.patch.by_name.test_by_line import Wrapper\nmodel = Wrapper({})",
        "the line creates the model and wraps it",
    ),
    "in DataParallel": ("model = nn.DataParallel({}).eval()", "the line creates the model and wraps it"),
    "beside another statement": ("steps = 1; model = {}", "the line holds several statements"),
    "behind a colon": ("if True: model = {}", "it follows a colon"),
    "in a head": ("for model in [{}]:\n    pass", "it is the head of a compound statement"),
    "with a helper there": (
        "def _keep_in_fp32(model):\n    return model\nmodel = {}",
        "it already has a function _keep_in_fp32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_creation_line_that_cannot_take_the_call_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    body, reason = REFUSED[name]
    path = tmp_path / "train.py"
    path.write_text("from torch import nn\n" + body.format("nn.Sequential(nn.Linear(4, 1))") + "\n", encoding="utf-8")
    scope, makings = run(path, path.read_bytes())
    making = makings.of(unwrapped(scope["model"]), ["0"])
    assert making is not None
    result = edited(path.read_bytes(), making, "0")
    assert result.source == path.read_bytes()
    (refused,) = result.refused
    assert re.match(reason, refused.reason)
