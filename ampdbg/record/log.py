"""The log of a run: one JSON line for each completed step. A killed process leaves it, and a record is made from it.

The first line names the format. Each further line holds a ``step``, an ``investigation``, or the rest of the
``record``. A later line for the same step or the record replaces an earlier one. When the record drops healthy steps,
the log is rewritten without them, so that it stays small.
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
"""Version 1 has investigations in the form of version 2 records."""

KINDS: Mapping[str, Hashable] = {"step": Step, "investigation": Investigation, "record": Record}
"""The types of a line's content by the line's only key."""

NEWS = 60.0
"""Maximum age in seconds of the record's line, with its times and counts."""

FIRST_KEPT, MOST_KEPT = 2, 16
"""A record keeps the first two investigations, and the last ones up to the maximum."""


def kept(investigations: Sequence[Investigation]) -> tuple[Investigation, ...]:
    """Return the investigations that the record of a long run keeps."""
    if len(investigations) <= MOST_KEPT:
        return tuple(investigations)
    return (*investigations[:FIRST_KEPT], *investigations[FIRST_KEPT - MOST_KEPT :])


class RunLog:
    """Writes the log of one run, beginning with the first step. If writing fails, it warns and the run continues.

    Args:
        path: the log file; only an existing log is overwritten. None creates a file for the command in the record
            folder.
        command: the name of the command.
        warn: called once with the error if writing fails.
        is_kept: False writes nothing.
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
        """Build the adapters in advance, so that the first step does not wait for them."""
        if not self._is_over:
            for kind in KINDS.values():
                adapter(kind)

    def step(self, step: Step) -> None:
        """Write a completed step."""
        self._last = step
        self._write(_line("step", step))

    def thinned(self, steps: Sequence[Step]) -> None:
        """Rewrite the log after the record dropped healthy steps; ``steps`` remain."""
        if self._path and self._file is not None and self._is_writable and self._path.is_file():
            lines = [_HEAD, self._record, *(_line("investigation", one) for one in self._seen)]
            lines += [_line("step", one) for one in steps]
            try:
                replace_file(self._path, b"".join(lines))
                self._reopen(self._path)
            except (OSError, RecordError) as error:
                self._goes_no_further(error)

    def note(self, news: object, record: Callable[[], Record], investigations: Sequence[Investigation]) -> None:
        """Write what is new besides the steps. Call this after each step.

        Args:
            news: a value that changes whenever the record changes, apart from its steps.
            record: makes the record.
            investigations: all investigations of the record.
        """
        if self._is_over:
            return
        for one in investigations:
            if not any(one is seen for seen in self._seen):
                self._write(_line("investigation", one))
        self._seen = tuple(investigations)
        if news != self._news or time.monotonic() - self._said > NEWS:
            self._news, self._said = news, time.monotonic()
            self._record = _line("record", replace(record(), steps=(), investigations=()))
            self._write(self._record)

    def end(self, record: Record) -> None:
        """Write the final record and close the log. A run without a step has no log."""
        if self._last is None:
            return
        if record.steps and record.steps[-1] != self._last:
            self.step(record.steps[-1])
        self.note(object(), lambda: record, record.investigations)
        self._is_over = True
        self._close()

    @property
    def _is_writable(self) -> bool:
        """True if the log is still open and this process began the run: a forked child writes nothing."""
        return not self._is_over and os.getpid() == self._owner

    def _write(self, line: bytes) -> None:
        """Append a line in one write, so that a killed process leaves the whole line or nothing."""
        if not self._is_writable:
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
        """Close the log after an error and warn; the run continues."""
        self._is_over = True
        self._close()
        where, why = str(self._path or self._folder), reason_of(error)
        self._warn(f"cannot write the log any more: {why if where in why else f'{where}: {why}'}; the run continues")


_HEAD = json.dumps({"format": LOG_FORMAT, "version": LOG_VERSION}).encode() + b"\n"


def _line(kind: str, value: Step | Investigation | Record) -> bytes:
    data = adapter(KINDS[kind]).dump_python(value, warnings=False, exclude_defaults=True)
    return _compact({kind: strict(data)}).encode() + b"\n"


_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _check_place(path: Path) -> None:
    """Check the path again on opening: the script may have made the file, or the path is a default.

    Raises:
        RecordError: the path is neither free nor a log.
    """
    if what_is_there := obstacle(path):
        raise RecordError(f"it is {what_is_there}; --log FILE names another file")
    if os.path.isfile(path) and os.path.getsize(path) > 0 and not is_log(path):
        raise RecordError("it holds no log, and would be overwritten; --log FILE names another file")


BEGINS = re.compile(rb'\s*\{\s*"format"\s*:\s*"%b"' % re.escape(LOG_FORMAT).encode())


def is_log(path: Path) -> bool:
    """True if the file begins like a log; a pipe is not read."""
    try:
        if not path.is_file():  # a pipe would block until data arrive
            return False
        with path.open("rb") as file:
            return BEGINS.match(file.readline(200)) is not None
    except OSError:
        return False


def read_log(path: Path) -> Record:
    """Return the record from a log, without a diagnosis. If the log has no end, the record is ``interrupted``.

    An incomplete last line is ignored.

    Raises:
        RecordError: the log cannot be read, has another version, or is damaged; the message names it.
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
    steps: dict[str, Any] = {}  # by number; a step that is written again keeps its place
    investigations: list[Any] = []
    record: dict[str, Any] = {}
    for number, line in enumerate(lines[1:-1], start=2):  # the rest after the last newline is empty or incomplete
        kind, value = _only(_parsed(line, number), number)
        if kind == "step":
            steps[str(value.get("step"))] = value
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
            "steps": [*steps.values()],
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
