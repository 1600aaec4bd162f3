"""Markdown for an issue, rendered by GitHub's own parser: length, folding, and escaped names."""

import html
import re
from dataclasses import replace

import cmarkgfm
import pytest
from cmarkgfm.cmark import Options
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.record.findings import Finding
from ampdbg.record.run import Record
from ampdbg.report.formats import written
from ampdbg.report.formats.markdown import MOST_CHARACTERS, escaped
from ampdbg.report.view import CommandContext, Look
from tests.report.page.samples import Parsed
from tests.report.records import run
from tests.report.runs import RUNS, record_of
from tests.test_escapes import HOSTILE
from tests.test_escapes import record_of as hostile_record

LOOK = Look(80, color=False, unicode=True)

MARKUP = {
    "a script": "<script>alert(1)</script>",
    "the end of a script": "net</script></details><h1>x",
    "an image": '<img src=x onerror="alert(1)">',
    "a link": "[net](http://example.com/x)",
    "a bare link": "http://example.com/x and www.example.com",
    "an image in Markdown": "![net](http://example.com/x.png)",
    "code": "`net` ``x`` ```y",
    "emphasis": "**net** __x__ ~~y~~ *z*",
    "a row of a table": "net | x | y",
    "a heading": "# net",
    "a quotation": "> net",
    "an item": "- net",
    "a numbered item": "1. net",
    "a rule": "---",
    "an entity": "&lt;net&gt; &amp;",
    "a mention": "@octocat and @org/team",
    "an issue": "#123 and GH-7",
    "an emoji": ":smile: :+1:",
    "a formula": "$x^2$ and $$y$$",
    "a comment": "<!-- net",
    "backslashes": "\\net\\*x*",
}


def rendered(text: str) -> str:
    """The HTML of GitHub's parser, including raw HTML."""
    shown: str = cmarkgfm.github_flavored_markdown_to_html(text, options=Options.CMARK_OPT_UNSAFE)
    return shown


def markdown(record: Record) -> str:
    return written(record, CommandContext("config.yaml", "r.json", "/home/me"), LOOK, "markdown")


def squeezed(text: str) -> str:
    return " ".join(text.replace("\u200b", "").split())


OURS = set("h3 p strong code pre ul li details summary table thead tbody tr th td br sub span".split())


@pytest.mark.parametrize("name", RUNS)
def test_every_markdown_report_is_short_and_uses_only_known_tags(name: str) -> None:
    text = markdown(record_of(name))
    page = Parsed(rendered(text))
    assert len(text) < 20_000
    assert set(page.tags) <= OURS
    assert page.tags[0] == "h3"
    assert text.count("<details>") == text.count("</details>") == page.tags.count("details")


def test_the_story_is_unfolded_and_the_tables_are_folded() -> None:
    page = rendered(markdown(record_of("scan_forward_overflow")))
    opened = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    assert "reaches 8,747,140 in FP32" in opened
    assert "ampdbg bisect config.yaml" in opened
    assert "attn.qkv.weight" not in opened
    assert "<td>attn.qkv.weight</td>" in page


def test_the_patch_is_an_exact_diff_in_a_code_block() -> None:
    page = rendered(markdown(record_of("suggestion")))
    (diff,) = re.findall(r'<pre lang="diff"><code>(.*?)</code></pre>', page, flags=re.DOTALL)
    assert "\n+                scores = q.float() @ k.float().transpose(-2, -1)" in html.unescape(diff)


@pytest.mark.parametrize("text", [*HOSTILE.values(), *MARKUP.values()], ids=[*HOSTILE, *MARKUP])
def test_user_names_create_no_tags_links_or_mentions(text: str) -> None:
    said = markdown(hostile_record(text))
    page = rendered(said)
    assert all(line.isprintable() for line in said.splitlines())
    assert set(Parsed(page).tags) <= OURS
    assert "href" not in page
    outside = re.sub(r"<(pre|code).*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"@\w|#\d|GH-\d|:smile:|:\+1:", Parsed(outside).text)


@pytest.mark.parametrize("text", MARKUP.values(), ids=MARKUP)
def test_escaped_markup_renders_as_the_original_text(text: str) -> None:
    for page in (escaped(text), f"| a |\n| --- |\n| {escaped(text)} |"):
        assert squeezed(text) in squeezed(Parsed(rendered(page)).text)


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
def test_every_escaped_ascii_text_renders_unchanged(text: str) -> None:
    assert squeezed(Parsed(rendered(escaped(text))).text) == squeezed(text)


def test_a_markdown_report_stays_below_githubs_size_limit() -> None:
    many = tuple(Finding("true-nan", "error", step, "forward", "x" * 900) for step in range(200))
    text = markdown(run([], findings=(*many,), error="y" * 200_000))
    assert len(text) < MOST_CHARACTERS + 1000 < 65_000 + 1
    assert rendered(text)
    long = replace(hostile_record("n" * 100_000), error="")
    assert len(markdown(long)) < 65_000
