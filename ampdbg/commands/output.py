"""Where a command writes: its record to a file, results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from ampdbg.errors import AmpdbgError, RecordError, reason_of
from ampdbg.files import replace_file
from ampdbg.given import Given
from ampdbg.record.file import add_record, write_atomically, write_latest, write_record
from ampdbg.record.run import Record
from ampdbg.report.formats import written
from ampdbg.report.view import Look, Order, Typed

from .interrupts import interrupts_held
from .options import RunOptions

PLAIN_WIDTH = 80
MAX_WIDTH = 140


def typed_as(given: str, written: Path | None, *, verbose: bool = False) -> Typed:
    """What a report needs to know of the command: ``given`` as it was typed, and where its record was written."""
    return Typed(given, shlex.quote(str(written)) if written else "", str(Path.cwd()), verbose=verbose)


PLAIN = Look(width=PLAIN_WIDTH, color=False, unicode=True)


def look_of(stream: TextIO | None) -> Look:
    """Asks the stream and the environment; only a colour terminal without NO_COLOR gets colours."""
    columns = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if _is_terminal(stream) else PLAIN_WIDTH
    return Look(min(MAX_WIDTH, columns), is_rich_terminal(stream), _carries(stream, "━┃┤└×✓"))


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError, AttributeError):  # it is closed, or something of the user's own
        return False


def is_rich_terminal(stream: TextIO | None) -> bool:
    """Colours and animation are wanted there; NO_COLOR, TERM=dumb, pipes and old Windows consoles want none."""
    if os.environ.get("NO_COLOR") or not _is_terminal(stream):
        return False
    from rich.console import Console

    console = Console(file=stream)
    return not (console.is_dumb_terminal or console.legacy_windows)


def say(message: str) -> None:
    """A line on stderr, for people; that nobody can read it any more is no reason to stop."""
    try:
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # the reader has gone, the disk is full, it is closed, or None
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """What is left in its buffer, and all that follows, goes nowhere: at exit Python would fail on it once more."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor, null = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        if null != descriptor:  # it is, where that was closed
            os.dup2(null, descriptor)
            os.close(null)


def write_result(text: str | bytes, stream: TextIO) -> None:
    """Writes the result, bytes as they are; a reader that has gone away, such as ``head``, ends it quietly.

    Raises:
        AmpdbgError: stdout cannot be written, as when it is closed or a file on a full disk.
    """
    if sys.__stdout__ is None and text:
        raise AmpdbgError("stdout: cannot be written: it is closed")
    try:
        if isinstance(text, bytes):  # past the encoding and the line ends of the stream
            stream.buffer.write(text)
        else:
            encoding = getattr(stream, "encoding", None) or "utf-8"  # a stream of text alone carries all
            # Names may hold any character: those that the stream does not carry are shown as escapes.
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        _silence(stream)
        if not isinstance(error, BrokenPipeError):
            raise AmpdbgError(f"stdout: cannot be written: {reason_of(error)}") from None


def in_form(text: str, format_: str) -> str | bytes:
    """What :func:`write_result` takes: a page for the stream as it is, other formats in UTF-8 whatever the locale."""
    return text if format_ == "text" else text.encode("utf-8", "replace")


def end_streams() -> None:
    """Flushes stdout and stderr, or gives up what is in them: Python would fail on it at exit, with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _silence(stream)


@contextlib.contextmanager
def results_only() -> Iterator[TextIO]:
    """Yields the real stdout; all that is printed from now on, by whatever means, goes to stderr.

    Python's ``sys.stdout`` is replaced, and so is the file descriptor beneath, which C++ code and subprocesses such
    as a DataLoader's workers write to. It stays so until the process ends: what the user's code prints by ``atexit``
    or from a thread would follow the result, and spoil it.
    """
    stdout = sys.stdout
    stdout.flush()
    sys.stdout = sys.stderr
    try:
        descriptor, stderr = stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's has no descriptor
        yield stdout
        return
    result = os.fdopen(os.dup(descriptor), "w", encoding=stdout.encoding, errors="backslashreplace")
    os.dup2(stderr, descriptor)
    try:
        yield result
    finally:
        with contextlib.suppress(OSError):  # the failed write was reported
            result.close()


def _carries(stream: TextIO | None, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@dataclass(frozen=True)
class Saved:
    """The file that a record was written to, and the one beside it with what it hands over.

    ``failures`` are why files that were asked for could not be written, by what they are: "page" and "record".
    """

    path: Path | None
    handed_over: Path | None = None
    failures: Mapping[str, RecordError] = field(default_factory=dict)

    def raise_failure(self) -> None:
        """Raises RecordError: a file could not be written where it was asked for."""
        for what in sorted(self.failures, reverse=True):  # the record's first
            raise self.failures[what]

    def say_failures(self) -> None:
        """A warning of each."""
        for what, failure in sorted(self.failures.items()):
            option = "--html" if what == "page" else "--record"
            say(f"warning: no {what} was written: {failure}; choose another place with {option} FILE")


WRITTEN: ContextVar[Path | None] = ContextVar("WRITTEN", default=None)
"""The record that this command has written: an interrupt behind that has lost nothing but the page."""


@interrupts_held()
def save(record: Record, asked_for: Path | None) -> Saved:
    """Writes the record where it was asked for, else into ``.ampdbg`` and as the latest.

    What cannot be written must not cost the page of a run that took hours, nor an interrupt the record.
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
    """Writes what the record hands over beside it, but over nothing."""
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


def with_page(saved: Saved, record: Record, typed: Typed, file: Path | None) -> Saved:
    """Writes the HTML page where it was asked for; why it could not be written must not cost what is printed."""
    if file is not None:
        try:
            write_atomically(file, written(record, typed, PLAIN, "html"))
        except RecordError as error:
            return replace(saved, failures={**saved.failures, "page": error})
    return saved


def show(
    record: Record,
    given: Given,
    stdout: TextIO,
    *,
    run: RunOptions,
    order: Order = "tightest",
    top: int | None = None,
) -> None:
    """Saves the record and its HTML page, and prints it or its text; ``order`` and ``top`` are a range profile's.

    Raises:
        RecordError: it or its HTML page could not be written where it was asked for.
        AmpdbgError: stdout cannot be written.
    """
    saved = save(record, run.record)
    typed = replace(typed_as(given.typed, saved.path, verbose=run.verbose), order=order, top=top)
    saved = with_page(saved, record, typed, run.html)
    form = "json" if run.json else "text"
    write_result(in_form(written(record, typed, look_of(stdout), form), form), stdout)
    saved.raise_failure()
