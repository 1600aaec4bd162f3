"""Reading and writing a Record as JSON (no torch). A file is written completely or not at all. Infinities and NaN
are written as the strings "inf", "-inf" and "nan", so that the file is strict JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampdbg.errors import RecordError, reason_of
from ampdbg.files import free_path, read_file, replace_file, replace_name
from ampdbg.quantities import dotted, shown
from ampdbg.record.run import READABLE_VERSIONS, RECORD_FORMAT, RECORD_VERSION, Record
from ampdbg.record.version_2 import upgraded

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

LARGEST_FILE = 2**30
"""Limit for reading, in bytes. The record of a model with ten thousand modules has 50 million bytes."""

FOLDER = Path(".ampdbg")
LATEST = FOLDER / "latest.json"
"""A copy of the latest record. Each run also has its own file in the folder."""

CAPTURES, CAPTURE_SUFFIX = FOLDER / "captures", ".safetensors"
"""The folder and the name suffix of capture files."""

MOST_CAPTURES, LARGEST_CAPTURE = 3, 4 * 2**30
"""The limits for one run: the number of captures, and the bytes of each."""


def to_json(record: Record) -> str:
    """Return the record as one strict JSON object, with keys in the order of the fields."""
    data = strict(adapter(Record).dump_python(record, warnings=False))
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    # User messages can contain unpaired surrogates, which UTF-8 cannot encode.
    text = text.encode("utf-8", "replace").decode("utf-8") + "\n"
    # Terminal control characters and changes of the writing direction are escaped too.
    return text if text.replace("\n", "").isprintable() else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    return char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1]


def from_json(text: str | bytes) -> Record:
    """Return the record that :func:`to_json` wrote, also if it is of version 2.

    Raises:
        RecordError: the text is not a record, has another version, or is damaged; the message names the key.
    """
    from pydantic_core import from_json as parsed

    try:
        data = parsed(text, allow_inf_nan=False)
    except ValueError as error:
        raise RecordError(f"not a record: {error}") from None
    if not isinstance(data, dict) or data.get("format") != RECORD_FORMAT:
        raise RecordError(f'not a record: it has no "format": "{RECORD_FORMAT}" (a config is a .yaml file)')
    if data.get("version") not in READABLE_VERSIONS:
        raise RecordError(
            f"a record of version {shown(data.get('version'))}; this ampdbg reads versions "
            f"{' and '.join(map(str, READABLE_VERSIONS))}. Run the command again to make a new record."
        )
    data = data if data["version"] == RECORD_VERSION else upgraded(data)
    return checked({**data, "version": RECORD_VERSION}, "record")


def checked(data: Mapping[str, Any], what: str) -> Record:
    """Return plain data as a Record; ``what`` names their source in errors.

    Raises:
        RecordError: the data are damaged; the message names the key.
    """
    from pydantic import ValidationError

    try:
        record: Record = adapter(Record).validate_python(data)
    except ValidationError as error:
        raise RecordError(f"a damaged {what}: {_first_mistake(error)}") from None
    _check_references(record)
    return record


def read_record(path: Path) -> Record:
    """Read a record file.

    Raises:
        RecordError: the file is missing, unreadable or not a record; the message names it.
    """
    try:
        return from_json(read_file(path, LARGEST_FILE))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {reason_of(error)}") from None
    except RecordError as error:
        if path.suffix == CAPTURE_SUFFIX:
            raise RecordError(
                f"{path}: a capture, not a record; to replay it: ampdbg replay {shlex.quote(str(path))}"
            ) from None
        raise RecordError(f"{path}: {error}") from None


def check_record(given: object, call: str) -> None:
    """Check that an argument is a Record; ``call`` shows the correct call.

    Raises:
        TypeError: it is not a Record.
    """
    if not isinstance(given, Record):
        made = "ampdbg.scan and its like return one, and record() of a watch"
        raise TypeError(f"got a {type(given).__name__} instead of a Record; allowed: {call}; {made}")


def write_record(record: Record, path: Path | str) -> None:
    """Write the record to ``path`` atomically: a reader sees the old file or the whole new one.

    Raises:
        RecordError: the folder is not writable or the disk is full; no partial file is left.
        TypeError: the argument is not a Record.
    """
    check_record(record, "write_record(record, path)")
    write_atomically(Path(path), to_json(record))


def write_atomically(path: Path, text: str, replace: Callable[[Path, bytes], None] = replace_file) -> None:
    """Replace ``path`` with ``text`` in one step, through a temporary file in the same folder.

    Raises:
        RecordError: the file cannot be written; the message names it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode("utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {reason_of(error)}") from None


def add_record(record: Record) -> Path:
    """Write the record to ``.ampdbg/<UTC time>-<command>.json`` and return the path.

    Raises:
        RecordError: the file cannot be written.
    """
    path = path_in_folder(Path(), record.created, of_rank(record.command, record.rank), ".json")
    try:
        write_record(record, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    keep_out_of_git(Path())
    return path


def write_latest(record: Record) -> None:
    """Write the record as the latest. An existing link is replaced, and its target does not change.

    Raises:
        RecordError: the file cannot be written.
    """
    write_atomically(LATEST, to_json(record), replace_name)


def of_rank(name: str, rank: int) -> str:
    """Return the file name for one of several processes; rank 0 has no suffix."""
    return f"{name}-rank-{rank}" if rank else name


def path_in_folder(beside: Path, created: str, command: str, suffix: str) -> Path:
    """Return ``.ampdbg/<UTC time>-<command><suffix>``, with a number if another run began in the same second.

    An empty file reserves the name.

    Raises:
        RecordError: the folder is not writable.
    """
    moment = datetime.fromisoformat(created.replace("Z", "+00:00"))  # Python 3.10 does not parse the Z
    time = moment.astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")  # without characters that file systems forbid
    try:
        return free_path(beside / FOLDER, f"{time}-{command}", suffix)
    except OSError as error:
        path = beside / FOLDER / f"{time}-{command}{suffix}"
        raise RecordError(f"{path}: cannot be written: {reason_of(error)}") from None


def latest_record() -> Path:
    """Return the path of the latest record in this folder.

    Raises:
        RecordError: there is none.
    """
    if not LATEST.exists():
        logs, make = sorted(FOLDER.glob("*.jsonl")), "make one with: ampdbg run SCRIPT, or ampdbg scan CONFIG"
        to_do = f"a run has left its log: ampdbg report {logs[-1]}" if logs else make
        raise RecordError(f"no record given, and none here ({LATEST}); {to_do}")
    return LATEST


def keep_out_of_git(beside: Path) -> None:
    """Make git ignore the folder, because records are results. pytest and ruff do the same with their caches."""
    marker = beside / FOLDER / ".gitignore"
    if not os.path.lexists(marker):  # a broken link counts as existing
        with contextlib.suppress(RecordError):
            write_atomically(marker, "# Made by ampdbg.\n*\n", replace_name)


@functools.cache
def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return the pydantic adapter that converts a dataclass to plain data and validates such data."""
    from pydantic import TypeAdapter  # keeps `ampdbg --help` fast

    return TypeAdapter(kind)


def strict(value: Any) -> Any:
    """Return plain data in which every infinity and NaN is a string, since JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def _first_mistake(error: ValidationError) -> str:
    """Return the first error, such as ``steps[3].loss: got "low"; needed: a valid number``."""
    first = error.errors(include_url=False, include_context=False)[0]
    key = dotted(first["loc"])
    if first["type"] == "missing":
        return f"{key}: missing"
    return f"{key}: got {shown(first['input'])}; {first['msg'].replace('Input should be', 'needed:')}"


def _check_references(record: Record) -> None:
    """Raise RecordError if an index refers to a finding that the record does not have."""
    count = len(record.findings)
    indices = {f"findings[{at}].root": finding.root for at, finding in enumerate(record.findings)}
    indices |= {f"pins[{at}].reason": pin.reason for at, pin in enumerate(record.pins)}
    for name, index in indices.items():
        if index is not None and index >= count:
            raise RecordError(f"a damaged record: {name}: got {index}; there are {count} findings")
