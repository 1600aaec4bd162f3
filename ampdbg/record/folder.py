"""The folder of records, ``.ampdbg``: each run has a file there, and the latest is there once more."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from pathlib import Path

from ampdbg.errors import RecordError
from ampdbg.record.file import write_atomically, write_record
from ampdbg.record.run import Record

FOLDER = Path(".ampdbg")
LATEST = FOLDER / "latest.json"


def add_record(record: Record) -> Path:
    """Writes the record to ``.ampdbg/<UTC time>-<command>.json``.

    Raises:
        RecordError: it cannot be written.
    """
    path = _reserved(FOLDER / f"{_utc_time(record.created)}-{record.command}.json")
    try:
        write_record(record, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _keep_out_of_git()
    return path


def latest_record() -> Path:
    """The path of the latest record of this folder.

    Raises:
        RecordError: there is none.
    """
    if not LATEST.exists():
        raise RecordError(f"no record given, and none here ({LATEST}); make one with: ampdbg scan CONFIG")
    return LATEST


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
        while True:
            with contextlib.suppress(FileExistsError), candidate.open("x"):
                return candidate
            number += 1
            candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    except OSError as error:
        raise RecordError(f"{candidate}: cannot be written: {error.strerror or error}") from None


def _keep_out_of_git() -> None:
    """Records are results, not sources: the folder ignores itself, as pytest's and ruff's caches do."""
    marker = FOLDER / ".gitignore"
    if not marker.exists():
        with contextlib.suppress(RecordError):
            write_atomically(marker, "# Made by ampdbg.\n*\n")
