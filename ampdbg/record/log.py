"""The log of a run: a line of JSON for each step as it ends, which a killed process leaves; it makes the record.

The first line names the format; each other one holds a ``step``, an ``investigation``, or of the ``record`` all that is
neither. A later line of a step or of the record replaces an earlier one. Where the record leaves healthy steps out, the
log is rewritten without them, so that it stays as small.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ampdbg.errors import RecordError, reason_of
from ampdbg.files import obstacle, read_file, replace_file
from ampdbg.quantities import shown
from ampdbg.record.file import LARGEST_FILE, adapter, checked, keep_out_of_git, path_in_folder, strict
from ampdbg.record.run import RECORD_FORMAT, RECORD_VERSION, Investigation, Record, Step
from ampdbg.record.version_2 import upgraded_investigation

LOG_FORMAT = "ampdbg.log"
LOG_VERSION = 2
READABLE_LOGS = (1, 2)
"""The first has investigations as records of version 2 have."""

KINDS: Mapping[str, Hashable] = {"step": Step, "investigation": Investigation, "record": Record}
"""What a line may hold, by its only key."""

NEWS = 60.0
"""Seconds after which the line of the record is written again: its times and counts are no older."""

FIRST_KEPT, MOST_KEPT = 2, 16
"""So many investigations are kept of a run: the first ones, and of the others the last."""


def kept(investigations: Sequence[Investigation]) -> tuple[Investigation, ...]:
    """Those that a record has of a long run."""
    if len(investigations) <= MOST_KEPT:
        return tuple(investigations)
    return (*investigations[:FIRST_KEPT], *investigations[FIRST_KEPT - MOST_KEPT :])


class RunLog:
    """The log of one run on its way. It begins with the first step; what cannot be written costs a warning.

    Args:
        path: of the file; a log that is there is written over, and nothing else is. None for one of the command's in
            the folder of records.
        command: the name of the command.
        warn: called once, with what has failed.
        is_kept: else nothing is written.
    """

    def __init__(self, path: Path | None, command: str, warn: Callable[[str], None], *, is_kept: bool = True) -> None:
        self._path = None if path is None else path.absolute()
        self._folder, self._command, self._warn = Path.cwd(), command, warn
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._owner = os.getpid()
        self._file: int | None = None
        self._is_over = not is_kept
        self._record = b""
        self._news: object = None
        self._said = 0.0
        self._seen: tuple[Investigation, ...] = ()
        self._last: Step | None = None

    def get_ready(self) -> None:
        """Makes once what the first line needs; the first step would have to wait for it."""
        if not self._is_over:
            for kind in KINDS.values():
                adapter(kind)

    def step(self, step: Step) -> None:
        """A step has ended."""
        self._last = step
        self._write(_line("step", step))

    def thinned(self, steps: Sequence[Step]) -> None:
        """Healthy steps have been left out of the record: these are in it."""
        if self._path and self._file is not None and self._goes_on and self._path.is_file():
            lines = [_HEAD, self._record, *(_line("investigation", one) for one in self._seen)]
            lines += [_line("step", one) for one in steps]
            try:
                replace_file(self._path, b"".join(lines))
                self._reopen(self._path)
            except (OSError, RecordError) as error:
                self._goes_no_further(error)

    def note(self, news: object, record: Callable[[], Record], investigations: Sequence[Investigation]) -> None:
        """To be called when a step has ended: what else has been seen.

        Args:
            news: another value wherever something of the record but its steps has changed.
            record: makes it.
            investigations: all that the record has.
        """
        if self._is_over:
            return
        for one in investigations:
            if not any(one is seen for seen in self._seen):
                self._write(_line("investigation", one))
        self._seen = tuple(investigations)
        if news != self._news or time.monotonic() - self._said > NEWS:
            self._news, self._said = news, time.monotonic()
            self._note_record(record())

    def end(self, record: Record) -> None:
        """The run has ended, with this record. A run without a step has no log."""
        if self._last is None:
            return
        if record.steps and record.steps[-1] != self._last:
            self.step(record.steps[-1])
        self.note(object(), lambda: record, record.investigations)
        self._is_over = True
        self._close()

    def _note_record(self, record: Record) -> None:
        self._record = _line("record", replace(record, steps=(), investigations=()))
        self._write(self._record)

    @property
    def _goes_on(self) -> bool:
        """It is not over, and the run began in this process: a forked child writes nothing."""
        return not self._is_over and os.getpid() == self._owner

    def _write(self, line: bytes) -> None:
        """One write for each line: what is killed in between has written it, or has not."""
        if not self._goes_on:
            return
        try:
            if self._file is None:
                self._open()
            left = line
            while left and self._file is not None:
                left = left[os.write(self._file, left) :]
        except (OSError, RecordError) as error:
            self._goes_no_further(error)

    def _open(self) -> None:
        if self._path is None:
            self._path = path_in_folder(self._folder, self._created, self._command, ".jsonl")
            keep_out_of_git(self._folder)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _check_place(self._path)
        with self._path.open("wb" if self._path.is_file() or not self._path.exists() else "ab") as file:
            file.write(_HEAD)
        self._reopen(self._path)

    def _reopen(self, path: Path) -> None:
        self._close()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _goes_no_further(self, error: OSError | RecordError) -> None:
        """What cannot be written ends the log, and not the run."""
        self._is_over = True
        self._close()
        where = self._path or self._folder
        self._warn(f"cannot write the log any more: {where}: {reason_of(error)}; the run continues")


_HEAD = json.dumps({"format": LOG_FORMAT, "version": LOG_VERSION}).encode() + b"\n"


def _line(kind: str, value: Step | Investigation | Record) -> bytes:
    data = adapter(KINDS[kind]).dump_python(value, warnings=False, exclude_defaults=True)
    return _compact({kind: strict(data)}).encode() + b"\n"


_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _check_place(path: Path) -> None:
    """Looks again where it is opened: the script may have made the file, or nobody has named it.

    Raises:
        RecordError: it is something of the user's.
    """
    if what_is_there := obstacle(path):
        raise RecordError(f"it is {what_is_there}; --log FILE names another file")
    if os.path.isfile(path) and os.path.getsize(path) > 0 and not is_log(path):
        raise RecordError("it holds no log, and would be overwritten; --log FILE names another file")


BEGINS = re.compile(rb'\s*\{\s*"format"\s*:\s*"%b"' % re.escape(LOG_FORMAT).encode())


def is_log(path: Path) -> bool:
    """The file begins as a log does; a pipe is not read."""
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return False
        with path.open("rb") as file:
            return BEGINS.match(file.readline(200)) is not None
    except OSError:
        return False


def read_log(path: Path) -> Record:
    """The record that the log makes, not yet diagnosed. One that does not end is ``interrupted``.

    A last line that was cut off is left out.

    Raises:
        RecordError: it cannot be read, is of another version, or damaged; the message names it.
    """
    try:
        return _record_of(read_file(path, LARGEST_FILE))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {reason_of(error)}") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def _record_of(content: bytes) -> Record:
    lines = content.split(b"\n")
    head = _parsed(lines[0], 1)
    if head.get("format") != LOG_FORMAT:
        raise RecordError("not a log")
    if head.get("version") not in READABLE_LOGS:
        version, readable = shown(head.get("version")), " and ".join(map(str, READABLE_LOGS))
        raise RecordError(f"a log of version {version}; this ampdbg reads versions {readable}")
    steps: dict[Any, Any] = {}
    investigations: list[Any] = []
    record: dict[str, Any] = {}
    for number, line in enumerate(lines[1:-1], start=2):  # behind the last end of a line is nothing, or a part of one
        kind, value = _only(_parsed(line, number), number)
        if kind == "step":
            steps[_number_of(value, number)] = value
        elif kind == "investigation":
            investigations.append(value if head["version"] == LOG_VERSION else upgraded_investigation(value))
        else:
            record = value
    if not record:
        raise RecordError("a log that ends before its first step; needed: at least one step")
    made = checked(
        {
            **record,
            "format": RECORD_FORMAT,
            "version": RECORD_VERSION,
            "steps": [steps[number] for number in sorted(steps)],
            "investigations": investigations,
        },
        "log",
    )
    return replace(made, investigations=kept(made.investigations))


def _parsed(line: bytes, number: int) -> dict[str, Any]:
    from pydantic_core import from_json

    try:
        data = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise RecordError(f"a damaged log: line {number}: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"a damaged log: line {number}: got {shown(data)}; needed: a mapping")
    return data


def _only(data: dict[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    kind, value = next(iter(data.items()), ("", None))
    if len(data) != 1 or kind not in KINDS or not isinstance(value, dict):
        raise RecordError(f"a damaged log: line {number}: got {shown(data)}; needed: one of {', '.join(KINDS)}")
    return kind, value


def _number_of(step: dict[str, Any], line: int) -> int:
    number = step.get("step")
    if isinstance(number, bool) or not isinstance(number, int):
        raise RecordError(f"a damaged log: line {line}: step.step: got {shown(number)}; needed: a whole number")
    return number
