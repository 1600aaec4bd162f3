"""Tests of the codes and their explanations: complete, of one form, true to each other, in the words of the field."""

import ast
import functools
import re
from dataclasses import fields

import pytest

from ampdbg.errors import AmpdbgError
from ampdbg.record.codes import CODES, FACTS, Code
from ampdbg.report.explanation import SECTIONS, Explanation, explanation, explanations
from tests.package_source import PACKAGE, trees

FILES = {path.stem: path for path in (PACKAGE / "record" / "explanations").glob("*.md")}

# The codes of the first release are in records and in scripts: none may be renamed or removed.
PUBLIC = """
forward-overflow silent-overflow buffer-poisoned gradient-overflow gradient-underflow no-usable-scale
scale-calibration scale-collapse scale-runaway eps-underflow optimizer-underflow mask-constant precision-loss
data-nonfinite data-range infinite-loss weights-nonfinite true-nan divergence hardware unknown
misuse-clip-scaled misuse-bare-step misuse-unscale-twice misuse-no-update misuse-accumulate misuse-stale-gradients
misuse-half-parameters misuse-no-scaler misuse-scaler-bfloat16 misuse-unused-optimizer misuse-many-updates
misuse-scheduler-on-skip misuse-custom-function misuse-backward-in-autocast misuse-bce misuse-gradient-penalty
""".split()

SHAPE = re.compile(r"[a-z]+(-[a-z0-9]+)+")
"""The shape of every code except the few of one word."""


def test_no_public_code_was_removed() -> None:
    assert set(PUBLIC) <= CODES.keys()


def test_each_code_has_an_explanation_file_and_each_file_a_code() -> None:
    assert FILES.keys() == set(CODES)


CATALOGUE = "record/codes.py"
RULES = "lint/rules/"
"""A rule of lint may find in source code the misuse that a diagnosis finds in a run."""

IN_TWO_MODULES = {
    "mask-constant": "found by an op's numbers, and by the error of torch",
    "misuse-clip-scaled": "found by the order of calls, and by the norm of the gradients",
}


def words(tree: ast.Module) -> set[str]:
    """The strings of one word, and the words of tables that are written as one string, without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(getattr(node.body[0], "value", None))
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and is_string(node.body[0])
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    texts = [node.value.split() for node in constants if isinstance(node.value, str)]
    return {word for text in texts if len(text) == 1 or set(text) <= CODES.keys() for word in text}


def is_string(first: ast.stmt) -> bool:
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)


@functools.cache
def words_of_modules() -> dict[str, set[str]]:
    return {name: words(tree) for name, tree in trees().items()}


def test_each_code_is_in_the_catalogue_and_in_the_one_family_that_decides_it() -> None:
    for code in CODES:
        modules = [name for name, found in words_of_modules().items() if code in found]
        rules = [name for name in modules if name.startswith(RULES)]
        families = [name for name in modules if name not in (CATALOGUE, *rules)]
        assert CATALOGUE in modules, code
        assert len(rules) <= 1, (code, rules)
        assert len(families) <= 1 + (code in IN_TWO_MODULES), (code, families)
        assert rules or families or code == "hardware", f"nothing decides {code}"


def test_every_code_that_a_diagnosis_or_a_probe_names_is_in_the_catalogue() -> None:
    def is_like_a_code(word: str) -> bool:
        return word.startswith(tuple(f"{code.partition('-')[0]}-" for code in CODES if code.startswith("misuse-")))

    assert {word for found in words_of_modules().values() for word in found if is_like_a_code(word)} <= CODES.keys()


@pytest.mark.parametrize(
    "source", ['Finding(code="true-nan")', 'if code in ("true-nan", "x"): pass', 'T = set("true-nan unknown".split())']
)
def test_the_search_for_codes_finds_strings_but_not_docstrings_and_messages(source: str) -> None:
    assert "true-nan" in words(ast.parse(source))
    assert "true-nan" not in words(ast.parse('"""true-nan"""\n' + f"x = 'the code true-nan is {len(source)}'"))


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_a_headline_uses_known_facts_and_is_a_sentence(code: Code) -> None:
    facts = dict.fromkeys(FACTS, "") | {"step": "3", "skips": "none of 6 steps skipped", "verdict": "Healthy"}
    for headline in filter(None, (code.headline, code.information)):
        said = headline.format(**facts)
        assert said.endswith(".")
        assert said[0].isupper() or said.startswith("bfloat16")
        assert code.message not in said or not code.message


CALLED_OVERFLOW = re.compile(
    r"nans?[- ](gradients? )?overflow|overflow\w* (in)?to (a )?nan|overflow\w* is (a )?nan|overflow\w* \(?nan",
    re.IGNORECASE,
)


@pytest.mark.parametrize("code", CODES)
def test_an_explanation_has_all_sections_known_codes_and_no_nan_called_overflow(code: str) -> None:
    entry, text = explanation(code), FILES[code].read_text(encoding="utf-8")
    title, headings = entry.title, re.findall(r"^##? .*", text, re.MULTILINE)
    assert headings == [f"# {title}", *(f"## {heading}" for heading in SECTIONS.values())]
    assert all(getattr(entry, field.name) for field in fields(Explanation))
    assert text.isascii()
    assert len(title) <= 80 - len(f"  {max(CODES, key=len)}  ")
    assert not title.endswith(".")
    mentioned = {word for word in re.findall(r"`([^`\n]+)`", text) if SHAPE.fullmatch(word)}
    assert mentioned <= set(CODES) - {code}
    for example in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.M):
        ast.parse(example)
        assert max(map(len, example.splitlines())) <= 76
    assert not CALLED_OVERFLOW.search(" ".join(text.split()))


@pytest.mark.parametrize("wrong", ["a NaN overflow", "it overflows to NaN", "overflow (NaN)", "NaN gradients overflow"])
def test_the_pattern_for_a_nan_called_overflow_finds_the_usual_slips(wrong: str) -> None:
    assert CALLED_OVERFLOW.search(wrong)


def test_explanations_are_in_the_order_of_the_codes_grouped_by_family() -> None:
    assert [entry.code for entry in explanations()] == list(CODES)
    families = [entry.family for entry in explanations()]
    assert families == sorted(families, key=families.index), "the codes of a family stand together"


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("forward-overlow", "did you mean forward-overflow?"),
        ("Forward_Overflow", "did you mean forward-overflow?"),
        ("overflow", "did you mean forward-overflow or silent-overflow or gradient-overflow?"),
        ("overflw", "did you mean forward-overflow or silent-overflow or gradient-overflow?"),
        ("bce", "did you mean misuse-bce?"),
        ("clip", "did you mean misuse-clip-scaled?"),
        ("misuse", "did you mean " + " or ".join(code for code in CODES if code.startswith("misuse-")) + "?"),
        ("fp16", "all codes: ampdbg explain"),
        ("", "all codes: ampdbg explain"),
    ],
)
def test_an_unknown_code_is_refused_with_similar_codes(given: str, suggested: str) -> None:
    with pytest.raises(AmpdbgError) as error:
        explanation(given)
    assert str(error.value).startswith(f"{given!r} is not a code; ")
    assert suggested in str(error.value)
