"""The trial journal: a file of JSON lines by which a search goes on where its process was killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampdbg.record.findings import Source
from ampdbg.record.pins import PinSite
from ampdbg.search.trial import Seen

Pins = tuple[str, ...]
Answers = dict[Pins, Seen]

KILLED = Seen(healthy=False, why="killed the process")
"""What is known of a trial that was begun and never ended: it is not to be run again."""


class Journal:
    """The trials of one search: each is a line on disk before it begins, and one after it ends.

    Whatever was begun and has no end killed its process. A file of another key, or none, is begun afresh; of a
    damaged one the lines before the damage count. Where the file cannot be written the search goes on without.
    One search at a time may use a file.

    Args:
        path: the file; its folder is made.
        key: what the trials hold for: any text, equal exactly where a trial would show the same.
        on_problem: told once why the file cannot be written.

    Attributes:
        answers: what was seen with each set of pins; :data:`KILLED` where it ended the process.
        problem: why nothing is written any more, or "".
    """

    def __init__(self, path: Path, key: str, on_problem: Callable[[str], None] = lambda problem: None) -> None:
        self.answers: Answers = {}
        self.problem = ""
        self._path = path
        self._on_problem = on_problem
        self._settled = 0  # how long the file was when no trial was under way
        header = _line({"ampdbg": "trials", "key": key})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            self.answers, self._settled = _understood(content, header)
            if len(content) > self._settled:
                os.truncate(path, self._settled)
        except OSError as error:
            self._give_up(error)
        if self._settled == 0:
            self._write(header)

    def keep(self, pins: Pins, run: Callable[[Pins], Seen]) -> Seen:
        """Runs a trial, with its lines in the file around it.

        A run that raises, as by Ctrl-C, counts as not made, so that the next search makes it.
        """
        self._write(_line({"begin": pins}), settles=False)
        try:
            seen = run(pins)
        except BaseException:
            self._write(_line({"not run": pins}))
            raise
        self._write(_line({"end": pins, "seen": dataclasses.asdict(seen)}))
        self.answers[pins] = seen
        return seen

    def discard(self) -> bool:
        """Deletes the file and all answers; whether it is gone."""
        self.answers = {}
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _write(self, line: bytes, *, settles: bool = True) -> None:
        if self.problem:
            return
        try:
            with self._path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
                if settles:
                    self._settled = file.tell()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        self.problem = f"{self._path}: {reason}; what is tried from here on is lost if the process is killed"
        with contextlib.suppress(OSError):
            # On a full disk a trial can begin and not end: it must not seem to have killed the process.
            os.truncate(self._path, self._settled)
        self._on_problem(self.problem)


def _line(content: dict[str, Any]) -> bytes:
    """JSON as Python reads it back: a loss may be NaN."""
    return json.dumps(content).encode() + b"\n"


def _understood(content: bytes, header: bytes) -> tuple[Answers, int]:
    """What the sound lines at the start of the file say, and how many bytes of it stay."""
    if not content.startswith(header):
        return {}, 0
    answers: Answers = {}
    size = last = len(header)
    begun: Pins | None = None
    for line in content[size:].split(b"\n")[:-1]:
        try:
            begun = _learn(json.loads(line), answers)
        except (ValueError, KeyError, TypeError):
            break
        last, size = size, size + len(line) + 1
    if begun is not None and size < len(content):
        # A line was being written behind it: the process outlived that trial, but what it saw is lost.
        del answers[begun]
        return answers, last
    return answers, size


def _learn(entry: dict[str, Any], answers: Answers) -> Pins | None:
    """Adds what a line says; the pins of a trial that it begins."""
    if "begin" in entry:
        begun = tuple(entry["begin"])
        answers[begun] = KILLED
        return begun
    if "end" in entry:
        answers[tuple(entry["end"])] = _seen(entry["seen"])
    else:
        del answers[tuple(entry["not run"])]
    return None


def _seen(entry: dict[str, Any]) -> Seen:
    sites = tuple(map(_site, entry["sites"]))
    return Seen(**{**entry, "suspects": tuple(entry["suspects"]), "sites": sites, "scales": tuple(entry["scales"])})


def _site(entry: dict[str, Any]) -> PinSite:
    source = entry["source"]
    return PinSite(**{**entry, "source": Source(**source) if source is not None else None})
