"""``ampdbg explain``: the list, one code, JSON, a wrong code; as a program of its own and without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ampdbg.record.codes import CODES
from ampdbg.report.explanation import explanation
from tests.commands.program import Here, imported_by, start


def test_without_a_code_it_lists_all(here: Here) -> None:
    result = here("explain")
    assert (result.code, result.stderr) == (0, "")
    assert all(f"  {code} " in result.stdout for code in CODES)
    assert result.stdout.endswith("ampdbg explain CODE\n")


@pytest.mark.parametrize("code", CODES)
def test_each_code_is_explained(code: str, here: Here) -> None:
    result = here("explain", code)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[1] == explanation(code).title


def test_json_is_the_data_of_one_or_of_all(here: Here) -> None:
    one = json.loads(here("explain", "true-nan", "--json").stdout)
    assert one == asdict(explanation("true-nan"))
    every = json.loads(here("explain", "--json").stdout)
    assert [entry["code"] for entry in every] == list(CODES)
    assert one in every


def test_the_program_answers_without_torch_in_plain_text(tmp_path: Path) -> None:
    result = start(tmp_path, "explain", "mask-constant", flags=("-X", "importtime"), FORCE_COLOR="1", NO_COLOR="1")
    assert result.code == 0
    assert "ampdbg.report.explanation" in imported_by(result)
    assert "torch" not in imported_by(result)
    assert "\x1b" not in result.stdout
    assert "masked_fill(~keep, torch.finfo(scores.dtype).min)" in result.stdout


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    result = start(tmp_path, "explain", "forward-overflow", PYTHONIOENCODING="ascii")
    assert result.code == 0
    assert result.stdout.startswith("forward-overflow - Forward pass\n")
    assert result.stdout.isascii()
