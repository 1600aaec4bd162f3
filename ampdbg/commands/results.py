"""What a command leaves: its record in a file, and the record or its page on stdout."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from ampdbg.errors import RecordError
from ampdbg.given import Given
from ampdbg.record.file import write_record
from ampdbg.record.folder import LATEST, add_record
from ampdbg.record.run import RECORD_FORMAT, Record
from ampdbg.report.formats import FORMATS
from ampdbg.report.view import Order

from .terminal import look_of, say, typed_as, write_result


@dataclass(frozen=True)
class Saved:
    """The file that a record was written to, or why there is none. ``asked_for`` is the one that was to be."""

    path: Path | None
    asked_for: Path | None = None
    failure: RecordError | None = None

    def report_failure(self) -> None:
        """Says that there is no record, where there is none.

        Raises:
            RecordError: a certain file was asked for.
        """
        if self.failure is None:
            return
        if self.asked_for is not None:
            raise self.failure
        say(f"warning: no record was written: {self.failure}; choose another place with --record FILE")


def save(record: Record, asked_for: Path | None) -> Saved:
    """Writes the record where it was asked for, else into ``.ampdbg`` and as the latest.

    What cannot be written must not cost the page of a run that took hours.
    """
    try:
        if asked_for is not None:
            write_record(record, asked_for)
            return Saved(asked_for, asked_for)
        path = add_record(record)
    except RecordError as error:
        return Saved(None, asked_for, error)
    try:
        write_record(record, LATEST)
    except RecordError as error:
        say(f"warning: {error}; the record of this run is {path}")
    return Saved(path)


def show(
    record: Record,
    given: Given,
    stdout: TextIO,
    *,
    asked_for: Path | None,
    as_json: bool,
    order: Order = "tightest",
    top: int = 10,
) -> None:
    """Saves the record, and prints it or its page; ``order`` and ``top`` are those of a range profile.

    Raises:
        RecordError: it could not be written where it was asked for.
        AmpdbgError: stdout cannot be written.
    """
    saved = save(record, asked_for)
    typed = replace(typed_as(given.typed, saved.path), order=order, top=top)
    write_result(FORMATS["json" if as_json else "text"](record, typed, look_of(stdout)), stdout)
    saved.report_failure()


def holds_something_else(path: Path) -> bool:
    """Whether a record written there would take the place of what is no record: a config, say."""
    try:
        if not path.is_file() or not path.stat().st_size:
            return False
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return path.is_file()
    return not isinstance(data, dict) or data.get("format") != RECORD_FORMAT
