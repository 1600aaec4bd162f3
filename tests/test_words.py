"""Tests of the words of messages and pages: no phrase that readers must read twice, and no long sentence."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.package_source import PACKAGE, trees

ROOT = PACKAGE.parent

BETTER = {
    r"tell|tells|told|telling|untold": "say, show, know; or name who knows",
    r"(run|runs|ran|running) (it |them |the step |that step )?again": "replay (a step), rerun (a command, a script)",
    r"(come|comes|came|coming) through": "is finite, is taken",
    r"what (it |they )?makes?": "name it: the op, the code, the cause",
    r"what (its|the|each|an|a|other) \w+ gives?": "the outputs of, the results of",
    r"makes of (it|that|them)": "computes from",
    r"stands? (for|in|behind|beside|there|at|below|still|on|before)|stood": "is; follows; means; does not move",
    r"(go|goes|went|going|gone) on": "continue",
    r"all the same": "still, anyway",
    r"in the place of": "instead of",
    r"at hand": "here, this",
    r"for want of": "because there is no",
    r"bears?": "survives, suits",
    r"anew": "again; start over, rebuild",
    r"held against": "compared with",
    r"(is|are|was|were|not) looked (at|for|into)": "ampdbg checks, examines, searches",
    r"nothing is said|says? nothing of": "is not reported; shows nothing about",
    r"without a word": "silently",
    r"comes? of": "comes from",
    r"by now": "since",
    r"in front of": "before",
    r"seen to|for ever|whatsoever|thereby|hereby|therein|hence": "leave it out",
}
"""Phrases that readers did not understand at once, and what to write instead."""

TURNS = re.compile(rf"\b({'|'.join(BETTER)})\b", re.IGNORECASE)

RIDDLES = re.compile(
    r"^Whether\b|\b(so many|whoever|somebody|nobody|lets? go of|goes? backward|(?<!there )is no|that which)\b"
)
"""Turns of docstrings that were read twice: name the noun, the actor or the number."""

MOST_WORDS = 20
"""Most words in a sentence of a message, or in a part of it between semicolons and colons."""

MOST_WORDS_OF_A_PAGE = 28
"""The same for a page of the documentation, whose reader has more time."""

FIELD = re.compile(r"\{[^{}]*\}")


def shown_strings(tree: ast.AST) -> Iterator[str]:
    """The strings of a module that contain words, without docstrings and code, but with the help of commands."""
    bodies = (body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list))
    aside = {id(part.value) for body in bodies for part in body if isinstance(part, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("command", "_program"):
            yield ast.get_docstring(node) or ""
        elif id(node) in aside | inner:
            continue
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield FIELD.sub("_", node.value)


def docstrings_and_comments(source: str) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and attributes, and the comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (type:|noqa|fmt:)", token.string):
            yield token.string.lstrip("# ")


PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / "docs").rglob("*.md"),
    *(PACKAGE / "record" / "explanations").glob("*.md"),
]


def prose(page: str) -> Iterator[str]:
    """The paragraphs and items of a page, without code, tables, headings and text made from the code."""
    page = re.sub(r"^```.*?^```|<!-- made from the code.*?until here -->", "", page, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", page):
        if not block.lstrip().startswith(("|", "#", "<")):
            yield from (" ".join(item.split()) for item in re.split(r"\n(?=\s*(?:- |\d\. ))", block))


def long_sentences(text: str, most: int) -> list[str]:
    sentences = re.split(r"(?<=[.;:!?])[\")]?\s+", text)
    return [sentence for sentence in sentences if len(sentence.split()) > most]


def is_message(text: str) -> bool:
    """Whether the text is neither source code nor a list of names."""
    return "\n" not in text.strip() and re.search(r"[|\\]|^(\w+ ){12}", text) is None


def test_messages_have_plain_words_and_short_sentences() -> None:
    shown = [(name, text) for name, tree in trees().items() for text in shown_strings(tree)]
    assert [(name, found[0], text) for name, text in shown for found in TURNS.finditer(text)] == []
    messages = [(name, text) for name, text in shown if is_message(text)]
    assert [(name, long) for name, text in messages for long in long_sentences(text, MOST_WORDS)] == []


def test_docstrings_and_comments_have_plain_words_and_short_sentences() -> None:
    sources = [(path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")]
    texts = [(name, text) for name, source in sources for text in docstrings_and_comments(source)]
    assert len(texts) > 3000
    assert [(name, found[0], text) for name, text in texts for found in TURNS.finditer(text)] == []
    assert [(name, found[0], text) for name, text in texts for found in RIDDLES.finditer(text)] == []
    assert [(name, long) for name, text in texts for long in long_sentences(text, MOST_WORDS)] == []


def test_documentation_pages_have_plain_words_and_short_sentences() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        lines = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
        assert [(path.name, found[0], line) for line in lines for found in TURNS.finditer(line)] == []
        long = [long for part in prose(text) for long in long_sentences(part, MOST_WORDS_OF_A_PAGE)]
        assert [(path.name, sentence) for sentence in long] == []


def test_the_page_of_a_record_has_plain_words() -> None:
    parts = [path.read_text("utf-8") for path in (PACKAGE / "report" / "formats" / "html").glob("*.html")]
    assert [found[0] for text in parts for found in TURNS.finditer(text)] == []


@pytest.mark.parametrize("turn", ["Run it again.", "it was told", "what its modules give", "it stands still"])
def test_unclear_phrases_are_found_in_any_case(turn: str) -> None:
    assert TURNS.search(turn)


def test_the_strings_of_a_module_are_checked_and_its_docstrings_are_not() -> None:
    tree = ast.parse('"""One thing."""\n\ndef command(x):\n    """Two things."""\n    return f"three {x} things"\n')
    assert list(shown_strings(tree)) == ["Two things.", "three _ things"]
