"""Golden pages of real runs, in every look; ``pytest --update-golden`` makes the runs again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampdbg.record.file import read_record, write_record
from ampdbg.record.run import Record
from tests.conftest import Golden
from tests.report.pages import rendered
from tests.report.runs import RECORDS, RUNS, remade

GOLDEN = Path(__file__).parent / "golden"
ANSI = re.compile(r"\x1b\[[0-9;]*m")

TO_COPY = ("ampdbg ", "Record: ")
"""How the lines begin that are never cut nor wrapped."""


def record_of(name: str) -> Record:
    return read_record(RECORDS / f"{name}.json")


@pytest.fixture
def record(name: str, request: pytest.FixtureRequest) -> Record:
    """The record of a run; it is made again where golden files are."""
    if request.config.getoption("--update-golden"):
        RECORDS.mkdir(parents=True, exist_ok=True)
        write_record(remade(name), RECORDS / f"{name}.json")
    return record_of(name)


def page(record: Record, *, width: int = 80, color: bool = False, unicode: bool = True) -> str:
    return rendered(record, config="config.yaml", folder="", width=width, color=color, unicode=unicode)


@pytest.mark.parametrize("name", RUNS)
def test_the_page_of_a_run_is_its_golden_file(name: str, record: Record, golden: Golden) -> None:
    golden(GOLDEN / f"{name}.txt", page(record))


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
