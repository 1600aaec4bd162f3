"""Shared parts of the pages: the roots of follow-ups, commands with a replaced option, and the formats."""

import html
import pkgutil
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.record.file import to_json
from ampdbg.record.findings import Finding
from ampdbg.report import formats
from ampdbg.report.formats import written
from ampdbg.report.view import CommandContext, Look, root_of, with_option
from tests.report.pages import rendered
from tests.report.records import healthy


def chained(roots: list[int | None]) -> list[Finding]:
    return [Finding("unknown", "error", 0, "forward", "message", root=root) for root in roots]


@pytest.mark.parametrize(
    ("roots", "ends"),
    [
        ([None, 0, 0], [0, 0, 0]),
        ([None, 0, 1], [0, 0, 0]),
        ([7, None], [0, 1]),
        ([-1], [0]),
        ([0], [0]),
        ([1, 0], [0, 0]),
        ([1, 2, 1], [0, 1, 1]),
    ],
)
def test_a_follow_up_is_shown_below_the_root_of_its_chain(roots: list[int | None], ends: list[int]) -> None:
    assert [root_of(chained(roots), index) for index in range(len(roots))] == ends


@given(st.lists(st.none() | st.integers(-1, 8), min_size=1, max_size=8))
def test_every_chain_ends_at_a_shown_finding_even_if_damaged(roots: list[int | None]) -> None:
    findings = chained(roots)
    ends = [root_of(findings, index) for index in range(len(findings))]
    assert all(ends[end] == end for end in ends)


SCAN = "ampdbg scan c.yaml"
COMMANDS = {
    "an option is added": (SCAN, "--steps", 50, f"{SCAN} --steps 50"),
    "it replaces its like": (f"{SCAN} --steps 5 --seed 3", "--steps", 50, f"{SCAN} --seed 3 --steps 50"),
    "a setting replaces that of its key alone": (
        f"{SCAN} --set precision.level=O1 --set train.seed=4",
        "--set",
        "precision.level=O0",
        f"{SCAN} --set train.seed=4 --set precision.level=O0",
    ),
    "a file may be called as an option": (
        "ampdbg scan 'my --steps 5.yaml'",
        "--steps",
        50,
        "ampdbg scan 'my --steps 5.yaml' --steps 50",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_with_option_replaces_an_option_and_keeps_the_others(name: str) -> None:
    command, option, value, expected = COMMANDS[name]
    assert with_option(command, option, value) == expected


def test_with_option_keeps_the_quoting_of_a_command() -> None:
    settings = ["a.b=[1, 2]", "c=it's", "d={x: $HOME}"]
    command = shlex.join(["ampdbg", "scan", "my c.yaml", *(word for one in settings for word in ("--set", one))])
    assert shlex.split(with_option(command, "--steps", 5)) == [*shlex.split(command), "--steps", "5"]


LOOK = Look(80, color=False, unicode=True)
TYPED = CommandContext("config.yaml", ".ampdbg/r.json", "/home/me", verbose=True)


def test_the_text_format_is_the_page_and_json_is_the_record() -> None:
    assert formats.FORMATS == ("html", "json", "markdown", "sarif", "text")
    assert formats.written(healthy(), TYPED, LOOK, "text") == rendered(healthy())
    assert formats.written(healthy(), TYPED, LOOK, "json") == to_json(healthy())


def test_a_module_in_the_formats_folder_is_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verdict.py").write_text("def write(record, typed, look):\n    return record.verdict\n")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "ampdbg.report.formats.verdict", None)  # removed again at the end
    del sys.modules["ampdbg.report.formats.verdict"]
    assert formats.written(healthy(), TYPED, LOOK, "verdict") == "healthy"
    assert "verdict" in [module.name for module in pkgutil.iter_modules(formats.__path__)]


@pytest.mark.parametrize(("module", "words"), [("1", "module 1"), ("net.1", "net.1"), ("", "")])
def test_a_module_named_by_a_number_is_called_a_module_in_sentences(module: str, words: str) -> None:
    root = Finding("forward-overflow", "error", 6, "forward", "m", "", module, "aten.mul.Tensor")
    text = " ".join(rendered(replace(healthy(), findings=(root,), verdict="precision")).split())
    assert f"The forward pass overflows{' in ' * bool(words)}{words} at step 6" in text
    assert f"step 6 · forward{' · ' * bool(words)}{words} · aten.mul.Tensor" in text


@pytest.mark.parametrize("name", ["text", "markdown", "html"])
def test_a_finding_and_its_effect_have_the_same_place_in_every_format(name: str) -> None:
    root = Finding(
        "gradient-overflow", "error", 6, "backward", "m", "", "net.a", "mul", "net.a.weight", evidence={"iteration": 3}
    )
    effect = replace(root, code="scale-collapse", step=7, evidence={"iteration": 4}, root=0)
    record = replace(healthy(), findings=(root, effect))
    shown = written(record, CommandContext("c.yaml", "r.json", "/home/me"), Look(140, color=False, unicode=True), name)
    text = " ".join(html.unescape(re.sub(r"<[^>]*>|\\|\u200b", "", shown)).split())
    assert "step 6 (iteration 3) · backward · net.a · mul · net.a.weight" in text
    assert "scale-collapse at step 7 (iteration 4): m" in text
