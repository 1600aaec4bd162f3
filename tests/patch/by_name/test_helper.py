"""The helper in a user's file: `NAME.in.py` becomes `NAME.out.py`, which creates the same model, with its pins."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampdbg.patch.by_name import edit_maker
from ampdbg.patch.edits import Edited
from ampdbg.probes.makings import Construction, Constructions
from ampdbg.record.pins import in_words
from tests.conftest import Golden

FIXTURES = Path(__file__).parents[1] / "fixtures" / "by_name"


@dataclass(frozen=True)
class Case:
    """A fixture's target, which a config would name as the model or its maker, and its pins."""

    target: str
    pins: tuple[str, ...]


CASES = {
    "function": Case("build_model", ("0",)),
    "class_with_init": Case("Net", ("first", "layer0", "layer1")),
    "variable": Case("network", ("0",)),
    "aliases": Case("build_model", ("0", "1")),
    "tabs_and_own_lines": Case("build_model", ("0:own", "0.query")),
    "long_list": Case("build_model", tuple(f"{n}.0" for n in range(8))),
}


WHOLE = {"function", "class_with_init", "tabs_and_own_lines"}
"""Fixtures whose golden file holds the helper; in the others one line replaces the helper."""

FOLD = "# The helper keeps {} in FP32.\n"


def helper_of(pins: Sequence[str]) -> str:
    """The helper for these layers, taken from ``function`` for one and from ``class_with_init`` for several."""
    shown, names = ("function", '"0"') if len(pins) == 1 else ("class_with_init", '["first", "layer0", "layer1"]')
    text = (FIXTURES / f"{shown}.out.py").read_text(encoding="utf-8")
    end = "    return model\n"
    helper = text[text.index("def _cast_up") : text.index(end, text.index("def _keep_in_fp32")) + len(end)]
    return helper.replace(names, json.dumps(pins[0] if len(pins) == 1 else list(pins)))


def folded(text: str, pins: Sequence[str]) -> str:
    """The text with its helper replaced by one line."""
    assert text.count(helper_of(pins)) == 1
    return text.replace(helper_of(pins), FOLD.format(", ".join(pins)))


def expanded(text: str) -> str:
    """The text with that line replaced by the helper."""
    return re.sub(FOLD.format("(.*)"), lambda line: helper_of(line[1].split(", ")), text)


def source(name: str, end: str = "in") -> bytes:
    return expanded((FIXTURES / f"{name}.{end}.py").read_text(encoding="utf-8")).encode()


def made(case: Case, path: Path) -> tuple[nn.Module, Construction]:
    """The model that a file creates, and the place of its creation."""
    scope: dict[str, Any] = {"__name__": "fixture"}
    with Constructions() as makings:
        exec(compile(path.read_bytes(), path, "exec"), scope)
        target = scope[case.target]
        model = target if isinstance(target, nn.Module) else eval("make()", {"__name__": "ampdbg", "make": target})
    assert isinstance(model, nn.Module)
    making = makings.of(model, case.pins)
    assert making is not None
    return model, making


def edited(name: str, folder: Path, text: bytes | None = None) -> Edited:
    """The edit of a file with this text, by default that of the fixture."""
    path = folder / "net.py"
    path.write_bytes(source(name) if text is None else text)
    return edit_maker(path.read_bytes(), made(CASES[name], path)[1], CASES[name].pins)


def test_every_fixture_has_a_case() -> None:
    assert {path.name.removesuffix(".in.py") for path in FIXTURES.glob("*.in.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_an_edited_fixture_equals_its_golden_file(name: str, golden: Golden, tmp_path: Path) -> None:
    result = edited(name, tmp_path)
    assert result.refused == ()
    assert result.source != source(name)
    text = result.source.decode()
    golden(FIXTURES / f"{name}.out.py", text if name in WHOLE else folded(text, CASES[name].pins))


@pytest.mark.parametrize("name", CASES)
def test_the_edited_file_creates_the_same_model_with_the_pinned_modules(name: str, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "net.py"
    models = []
    for end in ("in", "out"):
        path.write_bytes(source(name, end))
        models.append(made(case, path)[0])
    before, after = models
    assert list(after.state_dict()) == list(before.state_dict())
    pinned = {name.removesuffix(":own") for name in case.pins}
    assert {name for name, module in after.named_modules() if "forward" in vars(module)} == pinned


@pytest.mark.parametrize("name", CASES)
def test_a_second_helper_is_refused(name: str, tmp_path: Path) -> None:
    again = edited(name, tmp_path, source(name, "out"))
    assert again.source == source(name, "out")
    assert [refused.reason for refused in again.refused] == [
        "it already has a function _keep_in_fp32; add the modules to it by hand, or rename it"
    ]


KEPT = {
    "CRLF": source("function").replace(b"\n", b"\r\n"),
    "a byte order mark": b"\xef\xbb\xbf" + source("function"),
    "latin-1": b"# coding: latin-1\n" + source("function").replace(b"small", b"gr\xf6\xdfer"),
    "no newline at the end": source("function").rstrip(b"\n"),
    "a form feed": source("function").replace(b"LAYERS", b"\x0cLAYERS"),
}


@pytest.mark.parametrize("name", KEPT)
def test_lines_outside_the_edit_are_kept_byte_for_byte(name: str, tmp_path: Path) -> None:
    before = KEPT[name]
    after = edited("function", tmp_path, before).source
    end = b"\r\n" if name == "CRLF" else b"\n"
    kept = after.split(end)
    for line in before.split(end):
        if b"return" not in line and line.strip() != b")":
            assert line in kept
    assert (b"\r\n" in after) == (name == "CRLF")
    assert after.count(b"\n") == after.count(end)
    assert after.endswith(b"\n") == before.endswith(b"\n")


def test_the_edited_file_trains_without_ampdbg_and_raises_for_a_wrong_module_name(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_bytes(source("function", "out"))
    model, _ = made(CASES["function"], path)
    assert b"ampdbg" not in source("function", "out")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 4)).sum().backward()
    assert model.get_parameter("0.weight").grad is not None
    path.write_bytes(path.read_bytes().replace(b'"0"', b'"typo"'))
    with pytest.raises(AttributeError, match="typo"):
        made(CASES["function"], path)


# Refused edits and their reasons


REFUSED = {
    "a tuple": ("def build():\n    return Net(), 1\n", "no single call there creates the model"),
    "one of two": ("def build():\n    return Net() if A else Other()\n", "no single call there creates the model"),
    "a torch by another name": ("import jax as torch\nmodel = Net()\n", "the name torch means"),
    "a lambda": ("A = 1\nbuild = lambda: Net()\n", "no single call there creates the model"),
    "another helper of that name": ("def _keep_in_fp32(x):\n    return x\nmodel = Net()\n", "rename"),
    "another function of that name": (
        "def _forward_in_fp32(x):\n    return x\nmodel = Net()\n",
        "the name _forward_in_fp32 means something else",
    ),
    "another torch": ("torch = None\nmodel = Net()\n", "the name torch means something else"),
    "no Python": ("A = 1\ndef build(:\n", "does not parse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_edited_is_unchanged_and_refused_with_a_reason(name: str) -> None:
    text, reason = REFUSED[name]
    result = edit_maker(text.encode(), Construction("net.py", 2), ["a"])
    assert result.source == text.encode()
    (refused,) = result.refused
    assert reason in refused.reason


def test_in_words_names_numbered_modules_own_lines_and_the_root() -> None:
    names = ("2", "1.0", "2:own", "blocks.2", "", ":own")
    assert [in_words(name) for name in names] == [
        "module 2",
        "module 1.0",
        "module 2 (its own lines)",
        "blocks.2",
        "the model",
        "the model (its own lines)",
    ]
