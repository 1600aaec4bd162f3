"""Where a command's record is written, and which one is the latest."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime, timezone
from pathlib import Path

from ampdbg.errors import RecordError
from ampdbg.record.file import read_record, write_atomically, write_record
from ampdbg.record.run import Record

from .terminal import say

FOLDER = Path(".ampdbg")
LATEST = FOLDER / "latest.json"


def save_record(record: Record, path: Path | None) -> Path:
    """Writes the record to ``path``, or to ``.ampdbg/<UTC time>-<command>.json`` and ``.ampdbg/latest.json``.

    Raises:
        RecordError: it cannot be written.
    """
    if path is not None:
        write_record(record, path)
        return path
    path = _reserved(FOLDER / f"{_utc_time(record.created)}-{record.command}.json")
    try:
        write_record(record, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    write_record(record, LATEST)
    _keep_out_of_git()
    return path


def try_to_save(seen: Record, path: Path | None) -> tuple[Path | None, RecordError | None]:
    """Writes the record; a folder that cannot be written must not cost the report of a run that took hours."""
    try:
        return save_record(seen, path), None
    except RecordError as error:
        return None, error


def tell_unsaved(failure: RecordError | None, asked_for: Path | None) -> None:
    """Says that no record was written, where none was.

    Raises:
        RecordError: ``asked_for`` names the file that was to be.
    """
    if failure is None:
        return
    if asked_for is not None:
        raise failure
    say(f"warning: no record was written: {failure}; choose another place with --record FILE")


def load_record(path: Path | None) -> Record:
    """Reads ``path``, or the latest record of this folder.

    Raises:
        RecordError: there is none, or it is damaged.
    """
    if path is None and not LATEST.exists():
        raise RecordError(f"no record given, and none here ({LATEST}); make one with: ampdbg scan CONFIG")
    return read_record(path or LATEST)


def _utc_time(created: str) -> str:
    """ISO 8601 without what file systems dislike: ``20250102T030405Z``."""
    moment = datetime.fromisoformat(created.replace("Z", "+00:00"))  # Python 3.10 does not read the Z
    return moment.astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def _reserved(path: Path) -> Path:
    """``path``, or with a number behind it where another run began in the same second; an empty file holds the name.

    Raises:
        RecordError: the folder cannot be written.
    """
    candidate, number = path, 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while not _made(candidate):
            number += 1
            candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    except OSError as error:
        raise RecordError(f"{candidate}: cannot be written: {error.strerror or error}") from None
    return candidate


def _made(path: Path) -> bool:
    """Makes an empty file in one step, unless there is a file of that name."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    return True


def _keep_out_of_git() -> None:
    """Records are results, not sources: the folder ignores itself, as pytest's and ruff's caches do."""
    marker = FOLDER / ".gitignore"
    if not marker.exists():
        with contextlib.suppress(RecordError):
            write_atomically(marker, "# Made by ampdbg.\n*\n")
