"""Golden pages of real runs, in every look; ``pytest --update-golden`` makes the runs again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ampdbg.record.run import Record, Verdict
from tests.conftest import Golden
from tests.report.pages import rendered
from tests.report.runs import RUNS, keep, record_of

GOLDEN = Path(__file__).parent / "golden"
ANSI = re.compile(r"\x1b\[[0-9;]*m")

TO_COPY = ("ampdbg ", "Record: ", "All of it: ")
"""How the lines begin that are never cut nor wrapped."""


@pytest.fixture
def record(name: str, request: pytest.FixtureRequest) -> Record:
    """The record of a run; it is made again where golden files are."""
    if request.config.getoption("--update-golden"):
        keep(name)
    return record_of(name)


def page(record: Record, *, width: int = 80, color: bool = False, unicode: bool = True) -> str:
    return rendered(record, config="config.yaml", folder="", width=width, color=color, unicode=unicode)


@pytest.mark.parametrize("name", RUNS)
def test_the_page_of_a_run_is_its_golden_file(name: str, record: Record, golden: Golden) -> None:
    golden(GOLDEN / f"{name}.txt", page(record))


def story(name: str, *, width: int = 80, color: bool = False, unicode: bool = True) -> str:
    """What a command prints that is not asked for all."""
    path = f".ampdbg/20250102T030405Z-{record_of(name).command}.json"
    return rendered(
        record_of(name), folder="", width=width, color=color, unicode=unicode, record_path=path, verbose=False
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_story_of_a_run_fits_one_screen(name: str, golden: Golden) -> None:
    text = story(name)
    golden(GOLDEN / "stories" / f"{name}.txt", text)
    assert text.count("\n") <= 24


@pytest.mark.parametrize("name", ["scan_forward_overflow", "ranges_example", "bisect_example", "suggestion"])
def test_a_story_in_a_wide_terminal_and_in_colour(name: str, golden: Golden) -> None:
    golden(GOLDEN / "stories" / f"{name}_140.txt", story(name, width=140))
    for width in (80, 140):
        golden(GOLDEN / "stories" / f"{name}_{width}.ansi", story(name, width=width, color=True))
        plain = ANSI.sub("", story(name, width=width, color=True))
        assert [line.rstrip() for line in plain.splitlines()] == story(name, width=width).splitlines()


@pytest.mark.parametrize("name", RUNS)
def test_a_story_is_told_in_40_columns_and_in_ascii(name: str) -> None:
    lines = story(name, width=40).splitlines()
    assert max(len(line) for line in lines if not line.lstrip().startswith(TO_COPY)) <= 40
    assert story(name, unicode=False).isascii()


@pytest.mark.parametrize("name", ["scan_forward_overflow", "bisect_example", "scan_true_nan"])
def test_a_story_says_nothing_else_than_the_whole_page(name: str) -> None:
    whole = " ".join(page(record_of(name), width=200).split())
    told = [line.strip() for line in story(name, width=200).splitlines() if "✗" in line or "Remedy" in line]
    assert told
    assert all(" ".join(line.split())[:20] in whole for line in told)


@pytest.mark.parametrize("name", ["scan_runaway_scale", "ranges_example", "bisect_example"])
def test_a_wide_terminal_is_used(name: str, golden: Golden) -> None:
    golden(GOLDEN / f"{name}_140.txt", page(record_of(name), width=140))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_fits_except_for_what_is_there_to_copy(name: str, width: int) -> None:
    lines = page(record_of(name), width=width).splitlines()
    assert max(len(line) for line in lines if not line.lstrip().startswith(TO_COPY)) <= width


@pytest.mark.parametrize("name", RUNS)
def test_without_unicode_it_is_drawn_in_ascii(name: str) -> None:
    assert page(record_of(name), unicode=False).isascii()


@pytest.mark.parametrize("name", RUNS)
def test_colour_changes_no_character(name: str) -> None:
    colored = page(record_of(name), color=True)
    assert "\x1b[" in colored
    plain = [line.rstrip() for line in ANSI.sub("", colored).splitlines()]
    assert plain == page(record_of(name)).splitlines()


@pytest.mark.parametrize("verdict", ["healthy", "precision", "other", "inconclusive"])
@pytest.mark.parametrize("name", RUNS)
def test_a_record_that_has_lost_its_findings_has_a_page(name: str, verdict: Verdict) -> None:
    told = page(replace(record_of(name), findings=(), verdict=verdict))
    assert told.strip()
    assert "{" not in told.partition("\n")[0]
