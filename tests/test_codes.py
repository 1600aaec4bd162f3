"""The codes and their explanations: complete, of one form, true to each other, in the field's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import ampdbg
from ampdbg.errors import AmpdbgError
from ampdbg.record.codes import CODES, FAMILIES, SECTIONS, Explanation, explanation, explanations

PACKAGE = Path(ampdbg.__file__).parent
FILES = {path.stem: path for path in (PACKAGE / "record" / "explanations").glob("*.md")}

# The public codes. They stand in records and in scripts: one may be added, none renamed or removed.
PUBLIC = """
forward-overflow silent-overflow buffer-poisoned gradient-overflow gradient-underflow no-usable-scale
scale-calibration scale-collapse scale-runaway eps-underflow optimizer-underflow mask-constant precision-loss
data-nonfinite data-range infinite-loss weights-nonfinite true-nan divergence hardware unknown
misuse-clip-scaled misuse-bare-step misuse-unscale-twice misuse-no-update misuse-accumulate misuse-stale-gradients
misuse-half-parameters misuse-no-scaler misuse-scaler-bfloat16 misuse-unused-optimizer misuse-many-updates
misuse-scheduler-on-skip misuse-custom-function misuse-backward-in-autocast misuse-bce misuse-gradient-penalty
""".split()

SHAPE = re.compile(r"[a-z]+(-[a-z0-9]+)+")
"""What every code looks like but for the few of one word."""


def test_the_codes_are_the_public_ones_each_in_one_family() -> None:
    assert len(CODES) == sum(map(len, FAMILIES.values()))
    assert sorted(CODES) == sorted(PUBLIC)


def test_each_code_has_a_file_and_each_file_a_code() -> None:
    assert FILES.keys() == set(CODES)


def emitted(source: str) -> Iterator[str]:
    """The codes that a module can put into a finding.

    Anything said to be a ``code``, whether chosen by a condition or passed on, and every constant with a code's shape,
    which is how codes stand in tables.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "code":
            yield from _strings(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Finding") and node.args:
            yield from _strings(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and SHAPE.fullmatch(node.value):
            yield node.value


def _strings(node: ast.expr) -> Iterator[str]:
    """The string constants that an expression can be: of ``a if x == 'y' else b`` the two and not the condition."""
    if isinstance(node, ast.IfExp):
        yield from _strings(node.body)
        yield from _strings(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_every_code_that_a_diagnosis_can_emit_is_explained() -> None:
    modules = [*(PACKAGE / "diagnosis").rglob("*.py"), PACKAGE / "training" / "autocast_error.py"]
    found = {code: path.name for path in modules for code in emitted(path.read_text(encoding="utf-8"))}
    assert {"scale-collapse", "data-nonfinite", "misuse-bce"} <= found.keys(), "the scan has gone blind"
    assert {code: name for code, name in found.items() if code not in CODES} == {}


@pytest.mark.parametrize(
    "source",
    [
        'Finding(code="no-such", step=1)',
        'Finding("no-such", "error", 0)',
        'Finding(code="no-such" if late else "unknown")',
        'REMEDIES = {"no-such": "pin it"}',
        'TABLE = ((pattern, "no-such"),)',
    ],
)
def test_the_scan_sees_a_code_wherever_it_stands(source: str) -> None:
    assert "no-such" in set(emitted(source))


@pytest.mark.parametrize("code", CODES)
def test_an_explanation_has_its_title_and_all_sections_in_order(code: str) -> None:
    headings = re.findall(r"^##? .*", FILES[code].read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[1:] == [f"## {heading}" for heading in SECTIONS.values()]
    entry = explanation(code)
    assert headings[0] == f"# {entry.title}"
    assert all(getattr(entry, field.name) for field in fields(Explanation))


@pytest.mark.parametrize("code", CODES)
def test_a_title_fits_the_list_and_is_no_sentence(code: str) -> None:
    title = explanation(code).title
    assert len(title) <= 80 - len(f"  {max(CODES, key=len)}  ")
    assert not title.endswith(".")


@pytest.mark.parametrize("code", CODES)
def test_every_code_that_is_mentioned_exists_and_none_points_to_itself(code: str) -> None:
    mentioned = re.findall(r"`([^`\n]+)`", FILES[code].read_text(encoding="utf-8"))
    codes = {word for word in mentioned if SHAPE.fullmatch(word)}
    assert codes <= set(CODES) - {code}


@pytest.mark.parametrize("code", CODES)
def test_the_code_in_it_is_python_that_fits_80_columns(code: str) -> None:
    for example in re.findall(r"^```python\n(.*?)^```", FILES[code].read_text(encoding="utf-8"), re.DOTALL | re.M):
        ast.parse(example)
        assert max(map(len, example.splitlines())) <= 76


CALLED_OVERFLOW = re.compile(
    r"nans?[- ](gradients? )?overflow|overflow\w* (in)?to (a )?nan|overflow\w* is (a )?nan|overflow\w* \(?nan",
    re.IGNORECASE,
)


@pytest.mark.parametrize("code", CODES)
def test_a_nan_is_never_called_an_overflow(code: str) -> None:
    text = " ".join(FILES[code].read_text(encoding="utf-8").split())
    assert not CALLED_OVERFLOW.search(text)


@pytest.mark.parametrize("wrong", ["a NaN overflow", "it overflows to NaN", "overflow (NaN)", "NaN gradients overflow"])
def test_that_rule_sees_the_usual_slips(wrong: str) -> None:
    assert CALLED_OVERFLOW.search(wrong)


@pytest.mark.parametrize("code", CODES)
def test_any_terminal_can_show_it(code: str) -> None:
    assert FILES[code].read_bytes().isascii()


def test_all_explanations_come_in_the_order_of_the_families() -> None:
    assert tuple(entry.code for entry in explanations()) == CODES
    assert all(entry.code in FAMILIES[entry.family] for entry in explanations())


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("forward-overlow", "did you mean forward-overflow?"),
        ("Forward_Overflow", "did you mean forward-overflow?"),
        ("overflow", "did you mean forward-overflow or silent-overflow or gradient-overflow?"),
        ("bce", "did you mean misuse-bce?"),
        ("clip", "did you mean misuse-clip-scaled?"),
        ("misuse", "all codes: ampdbg explain"),
        ("fp16", "all codes: ampdbg explain"),
        ("", "all codes: ampdbg explain"),
    ],
)
def test_an_unknown_code_is_told_with_those_near_it(given: str, suggested: str) -> None:
    with pytest.raises(AmpdbgError) as error:
        explanation(given)
    assert str(error.value).startswith(f"{given!r} is not a code; ")
    assert suggested in str(error.value)
