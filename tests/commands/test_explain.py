"""``ampdbg explain``: the list, one code, JSON, no import of torch, and complete texts."""

import json
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest

from ampdbg.commands.explain import as_text
from ampdbg.record.codes import CODES
from ampdbg.report.explanation import SECTIONS, explanation
from ampdbg.report.formats.text import blocks
from ampdbg.report.view import Look
from tests.commands.program import Here, imported_by, start

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(code: str, width: int = 80) -> str:
    return as_text(code, Look(width, color=False, unicode=True))


def test_explain_without_a_code_lists_all_codes(here: Here) -> None:
    result = here("explain")
    assert (result.code, result.stderr) == (0, "")
    assert all(f"  {code} " in result.stdout for code in CODES)
    assert result.stdout.endswith("ampdbg explain CODE\n")


@pytest.mark.parametrize("code", CODES)
def test_each_code_is_explained(code: str, here: Here) -> None:
    result = here("explain", code)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[1] == explanation(code).title


def test_json_prints_the_explanation_of_one_code_or_of_all_codes(here: Here) -> None:
    one = json.loads(here("explain", "true-nan", "--json").stdout)
    assert one == asdict(explanation("true-nan"))
    every = json.loads(here("explain", "--json").stdout)
    assert [entry["code"] for entry in every] == list(CODES)
    assert one in every


def test_explain_prints_plain_text_without_importing_torch(tmp_path: Path) -> None:
    result = start(tmp_path, "explain", "mask-constant", flags=("-X", "importtime"), FORCE_COLOR="1", NO_COLOR="1")
    assert result.code == 0
    assert "ampdbg.report.explanation" in imported_by(result)
    assert "torch" not in imported_by(result)
    assert "\x1b" not in result.stdout
    assert "masked_fill(~keep, torch.finfo(scores.dtype).min)" in result.stdout


def test_a_stdout_without_unicode_gets_ascii(tmp_path: Path) -> None:
    result = start(tmp_path, "explain", "forward-overflow", PYTHONIOENCODING="ascii")
    assert result.code == 0
    assert result.stdout.startswith("forward-overflow - Forward pass\n")
    assert result.stdout.isascii()


@pytest.mark.parametrize("code", CODES)
def test_each_explanation_is_complete_in_80_columns_with_and_without_colour(code: str) -> None:
    entry, text = explanation(code), plain(code)
    assert max(map(len, text.splitlines())) <= 80
    assert plain(code, width=120) == text
    written = "\n".join(getattr(entry, field) for field in SECTIONS)
    assert set(re.sub(r"^```.*$", "", written, flags=re.MULTILINE).split()) <= set(text.split())
    examples = [example for kind, example in blocks(entry.remedy) if kind == "code"]
    assert [example for example in examples if textwrap.indent(example, "    ") not in text] == []
    colored = as_text(code, Look(80, color=True, unicode=True))
    assert "\x1b[" in colored
    assert [line.rstrip() for line in ANSI.sub("", colored).splitlines()] == text.splitlines()
