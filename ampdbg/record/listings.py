"""The lines of code that a record names, stored in the record (no torch). Reports can show the lines as they were
when they ran."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ampdbg.record.findings import CodeLine, Listing
from ampdbg.record.run import Record

WHOLE = 400
"""A file with at most this many lines is stored completely."""

AROUND = 8
"""In a longer file, this many lines are stored before and after each line that the record names."""

MOST_LINES = 5000
"""Limit for all files together, so that the record stays small. The lines that are named first are stored."""

MOST_CHARACTERS = 300
"""Limit of one line; the rest is cut."""


def with_listings(record: Record) -> Record:
    """Return the record with the code that its findings, replays, pins and sites name. A file is not read if a named
    line has changed since the run. The record then keeps the listing that it has, if any."""
    named: dict[str, dict[int, str]] = {}
    for source in sources_of(record):
        named.setdefault(source.file, {})[source.line] = source.text
    listings: list[Listing] = []
    left = MOST_LINES
    for file, texts in named.items():
        known = (one for one in record.listings if one.file == file)  # for a record that was given instead of a config
        for listing in tuple(_listings(file, texts)) or known:
            left -= len(listing.lines)
            if left < 0:
                return replace(record, listings=tuple(listings))
            listings.append(listing)
    return replace(record, listings=tuple(listings))


def sources_of(record: Record) -> Iterator[CodeLine]:
    """Yield every line that the record names, the most important first."""
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
    """Yield the first and the last line of each piece to store, counted from 1."""
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
