"""What a command leaves: its record in a file, its page, and its report on stdout."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from ampdbg.errors import RecordError, reason_of
from ampdbg.files import replace_file
from ampdbg.given import CommandInput
from ampdbg.record.file import add_record, write_atomically, write_latest, write_record
from ampdbg.record.run import Record
from ampdbg.report.formats import written
from ampdbg.report.view import CommandContext, Look, Order

from .interrupts import interrupts_held
from .options import RunOptions
from .streams import is_rich_terminal, is_terminal, say, write_result

PLAIN_WIDTH = 80
MAX_WIDTH = 140


def typed_as(given: str, written: Path | None, *, verbose: bool = False) -> CommandContext:
    """Return what a report needs of the command: ``given`` as typed, and where its record was written."""
    return CommandContext(given, shlex.quote(str(written)) if written else "", str(Path.cwd()), verbose=verbose)


PLAIN = Look(width=PLAIN_WIDTH, color=False, unicode=True)


def look_of(stream: TextIO | None) -> Look:
    """Return what a stream can show; only a color terminal without NO_COLOR gets colors."""
    columns = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if is_terminal(stream) else PLAIN_WIDTH
    return Look(min(MAX_WIDTH, columns), is_rich_terminal(stream), _carries(stream, "━┃┤└×✓"))


def _carries(stream: TextIO | None, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def in_form(text: str, format_: str) -> str | bytes:
    """Return the argument of :func:`write_result`: text as it is, other formats in UTF-8 in any locale."""
    return text if format_ == "text" else text.encode("utf-8", "replace")


@dataclass(frozen=True)
class Saved:
    """The file of a record, and the file beside it with the patch that it hands over.

    ``failures`` are the errors of requested files that could not be written, by "page" and "record".
    """

    path: Path | None
    handed_over: Path | None = None
    failures: Mapping[str, RecordError] = field(default_factory=dict)

    def raise_failure(self) -> None:
        """Raise RecordError if a requested file could not be written."""
        for what in sorted(self.failures, reverse=True):  # the record's first
            raise self.failures[what]

    def say_failures(self) -> None:
        for what, failure in sorted(self.failures.items()):
            option = "--html" if what == "page" else "--record"
            say(f"warning: no {what} was written: {failure}; choose another place with {option} FILE")


WRITTEN: ContextVar[Path | None] = ContextVar("WRITTEN", default=None)
"""The record that this command has written: a later interrupt loses at most the page."""


@interrupts_held()
def save(record: Record, asked_for: Path | None) -> Saved:
    """Write the record to the requested file, else into ``.ampdbg`` and as the latest.

    A failed write must not lose the page of a run that took hours. An interrupt must not lose the record.
    """
    try:
        if asked_for is not None:
            write_record(record, asked_for)
        path = asked_for or add_record(record)
    except RecordError as error:
        if asked_for is not None:
            return Saved(None, failures={"record": error})
        say(f"warning: no record was written: {error}; choose another place with --record FILE")
        return Saved(None)
    WRITTEN.set(path)
    try:
        if asked_for is None and record.rank == 0:
            write_latest(record)
    except RecordError as error:
        say(f"warning: {error}; the record of this run is {path}")
    return Saved(path, _handed_over(record, path))


def _handed_over(record: Record, beside: Path) -> Path | None:
    """Write the patch of the record beside it, if no file has that name."""
    from ampdbg.report.suggestion import FORMS, content

    text = content(record)
    if text is None or record.handover is None:
        return None
    file = beside.with_suffix(FORMS[record.handover.form].suffix)
    if file.exists():
        return None
    try:
        replace_file(file, text)
    except OSError as error:
        say(f"warning: {file}: cannot be written: {reason_of(error)}")
        return None
    return file


def with_page(saved: Saved, record: Record, typed: CommandContext, file: Path | None) -> Saved:
    """Write the HTML page to the requested file; a failure is kept, so that the report is still printed."""
    if file is not None:
        try:
            write_atomically(file, written(record, typed, PLAIN, "html"))
        except RecordError as error:
            return replace(saved, failures={**saved.failures, "page": error})
    return saved


def show(
    record: Record,
    given: CommandInput,
    stdout: TextIO,
    *,
    run: RunOptions,
    order: Order = "tightest",
    top: int | None = None,
) -> None:
    """Save the record and its HTML page, and print it or its text; ``order`` and ``top`` apply to a range profile.

    Raises:
        RecordError: the record or its HTML page could not be written to the requested file.
        AmpdbgError: stdout cannot be written.
    """
    saved = save(record, run.record)
    typed = replace(typed_as(given.typed, saved.path, verbose=run.verbose), order=order, top=top)
    saved = with_page(saved, record, typed, run.html)
    form = "json" if run.json else "text"
    write_result(in_form(written(record, typed, look_of(stdout), form), form), stdout)
    saved.raise_failure()
