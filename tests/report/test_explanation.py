"""Explanations as text: the list and one entry as golden files, and what holds for all of them."""

from __future__ import annotations

import re
import textwrap

import pytest

from ampdbg.commands.explain import as_text
from ampdbg.record.codes import CODES
from ampdbg.report.explanation import SECTIONS, explanation
from ampdbg.report.formats.text import blocks
from ampdbg.report.view import Look

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(code: str, width: int = 80) -> str:
    return as_text(code, Look(width, color=False, unicode=True))


@pytest.mark.parametrize("code", CODES)
def test_it_fits_80_columns_also_on_a_wider_terminal(code: str) -> None:
    assert max(map(len, plain(code).splitlines())) <= 80
    assert plain(code, width=120) == plain(code)


@pytest.mark.parametrize("code", CODES)
def test_no_word_of_the_file_is_lost(code: str) -> None:
    entry = explanation(code)
    written = "\n".join(getattr(entry, field) for field in SECTIONS)
    assert set(re.sub(r"^```.*$", "", written, flags=re.MULTILINE).split()) <= set(plain(code).split())


@pytest.mark.parametrize("code", CODES)
def test_its_code_can_be_copied_as_it_stands(code: str) -> None:
    for kind, text in blocks(explanation(code).remedy):
        if kind == "code":
            assert textwrap.indent(text, "    ") in plain(code)


@pytest.mark.parametrize("code", CODES)
def test_colour_changes_no_character(code: str) -> None:
    colored = as_text(code, Look(80, color=True, unicode=True))
    assert "\x1b[" in colored
    assert [line.rstrip() for line in ANSI.sub("", colored).splitlines()] == plain(code).splitlines()
