"""The lines of code that a record names, kept in it: a page shows them as they were when they ran (no torch)."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ampdbg.record.findings import CodeLine, Listing
from ampdbg.record.run import Record

WHOLE = 400
"""A file of so many lines is kept whole."""

AROUND = 8
"""Of a longer one so many lines are kept on both sides of each that is named."""

MOST_LINES = 5000
"""Of all files together, so that a record stays small: what is named first is kept."""

MOST_CHARACTERS = 300
"""Of a line: the rest is cut."""


def with_listings(record: Record) -> Record:
    """The record with the code that its findings, replays, pins and sites name.

    Of a file that has changed since the run, so that the lines have another text there, nothing new is kept.
    """
    named: dict[str, dict[int, str]] = {}
    for source in sources_of(record):
        named.setdefault(source.file, {})[source.line] = source.text
    listings: list[Listing] = []
    left = MOST_LINES
    for file, texts in named.items():
        known = (one for one in record.listings if one.file == file)  # where a record was given for a config
        for listing in tuple(_listings(file, texts)) or known:
            left -= len(listing.lines)
            if left < 0:
                return replace(record, listings=tuple(listings))
            listings.append(listing)
    return replace(record, listings=tuple(listings))


def sources_of(record: Record) -> Iterator[CodeLine]:
    """Every line that the record names, what matters most first."""
    producers = (one for seen in record.investigations for replay in seen.replays for one in replay.producers)
    things = (
        (one.source for one in record.findings),
        (one.source for one in record.misuses),
        (pin.source for pin in record.pins),
        (site.source for pin in record.pins for site in pin.sites),
        (one.source for one in producers),
        (one.source for one in record.sites),
        (one.source for one in record.trends),
    )
    for source in chain(*things):
        yield from (one for one in (source, source and source.called_from) if one is not None)


def _listings(file: str, texts: dict[int, str]) -> Iterator[Listing]:
    lines = linecache.getlines(file)
    if any(not 0 < number <= len(lines) or lines[number - 1].strip() != text for number, text in texts.items()):
        return
    for first, last in _stretches(sorted(texts), len(lines)):
        yield Listing(file, first, tuple(text.rstrip("\r\n")[:MOST_CHARACTERS] for text in lines[first - 1 : last]))


def _stretches(numbers: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """The first and the last line of each piece to keep, counted from 1."""
    if count <= WHOLE:
        yield 1, count
        return
    first = last = 0
    for number in numbers:
        start, end = max(1, number - AROUND), min(count, number + AROUND)
        if last and start > last + 1:
            yield first, last
            first = start
        first, last = first or start, end
    yield first, last
