"""The source lines that a record keeps around its findings."""

import linecache
from dataclasses import replace
from pathlib import Path

from ampdbg.record.file import from_json, to_json
from ampdbg.record.findings import Finding, Listing, Source
from ampdbg.record.listings import AROUND, MOST_CHARACTERS, MOST_LINES, WHOLE, with_listings
from ampdbg.record.run import Record
from tests.report.records import run


def naming(file: Path, *numbers: int) -> Record:
    """A record whose findings name these lines with their current text."""
    linecache.checkcache()
    sources = [Source(str(file), number, "f", linecache.getline(str(file), number).strip()) for number in numbers]
    return run([], findings=tuple(Finding("unknown", "error", 0, "forward", "", source=one) for one in sources))


def written(file: Path, lines: int) -> Path:
    file.write_text("".join(f"    x{number} = 1\n" for number in range(1, lines + 1)), encoding="utf-8")
    return file


def test_a_short_file_is_kept_whole(tmp_path: Path) -> None:
    file = written(tmp_path / "model.py", WHOLE)
    (listing,) = with_listings(naming(file, 3, 9)).listings
    assert (listing.file, listing.first) == (str(file), 1)
    assert listing.lines == tuple(f"    x{number} = 1" for number in range(1, WHOLE + 1))


def test_a_long_file_keeps_the_lines_around_each_finding_and_joins_neighbours(tmp_path: Path) -> None:
    file = written(tmp_path / "model.py", 2000)
    pieces = with_listings(naming(file, 1000, 1010, 1, 2000)).listings
    spans = [(one.first, one.first + len(one.lines) - 1) for one in pieces]
    assert spans == [(1, 1 + AROUND), (1000 - AROUND, 1010 + AROUND), (2000 - AROUND, 2000)]
    assert pieces[1].lines[AROUND] == "    x1000 = 1"


def test_a_changed_file_gets_no_new_listing_and_keeps_the_earlier_one(tmp_path: Path) -> None:
    file = written(tmp_path / "model.py", 20)
    record = naming(file, 3)
    file.write_text("# new\n" + file.read_text("utf-8"), encoding="utf-8")
    linecache.checkcache()
    assert with_listings(record).listings == ()
    kept = (Listing(str(file), 1, ("as it was",)),)
    assert with_listings(replace(record, listings=kept)).listings == kept


def test_a_missing_file_leaves_the_record_unchanged(tmp_path: Path) -> None:
    source = Source(str(tmp_path / "gone.py"), 7, "f", "x = 1")
    record = run([], findings=(Finding("unknown", "error", 0, "forward", "", source=source),))
    assert with_listings(record) == record


def test_listings_are_limited_in_lines_and_in_characters_per_line(tmp_path: Path) -> None:
    files = [written(tmp_path / f"model_{number}.py", WHOLE) for number in range(MOST_LINES // WHOLE + 5)]
    (tmp_path / "wide.py").write_text("x = '" + "y" * 10_000 + "'\n", encoding="utf-8")
    records = [naming(file, 1) for file in (tmp_path / "wide.py", *files)]
    record = replace(records[0], findings=tuple(one for record in records for one in record.findings))
    listings = with_listings(record).listings
    assert sum(len(one.lines) for one in listings) <= MOST_LINES
    assert max(len(text) for one in listings for text in one.lines) == MOST_CHARACTERS


def test_listings_survive_a_round_trip_through_json(tmp_path: Path) -> None:
    record = with_listings(naming(written(tmp_path / "model.py", 5), 2))
    assert from_json(to_json(record)) == record
