"""A Record as JSON and as a file: written whole or not at all, read back or refused with the reason (no torch).

Infinities and NaN are written as the strings "inf", "-inf" and "nan", so that the file is strict JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampdbg.errors import RecordError
from ampdbg.files import replace_file
from ampdbg.record.run import RECORD_FORMAT, RECORD_VERSION, Record


def to_json(record: Record) -> str:
    """The record as one strict JSON object, keys in the order of the fields."""
    return json.dumps(_encode(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> Record:
    """Reads what :func:`to_json` wrote.

    Raises:
        RecordError: the text is no record, or one of a version that this ampdbg does not know.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"not a record: line {error.lineno} is not JSON ({error.msg})") from None
    except RecursionError:
        raise RecordError("not a record: its JSON is nested too deeply") from None
    if not isinstance(data, dict) or data.get("format") != RECORD_FORMAT:
        raise RecordError(f'not a record: it has no "format": "{RECORD_FORMAT}"')
    if data.get("version") != RECORD_VERSION:
        raise RecordError(
            f"a record of version {data.get('version')!r}; this ampdbg reads version {RECORD_VERSION}. "
            "Run the command again to make a new record."
        )
    try:
        record = _decode(Record, data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"a damaged record: {error}") from None
    assert isinstance(record, Record)
    return record


def read_record(path: Path) -> Record:
    """Reads a record file.

    Raises:
        RecordError: the file is missing, unreadable or no record; the message names it.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path}: not a record: the file is not text") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def write_record(record: Record, path: Path) -> None:
    """Writes the record to ``path`` atomically: a reader sees the old file or the whole new one.

    Raises:
        RecordError: the folder cannot be written or the disk is full; nothing is left half written.
    """
    write_atomically(path, to_json(record))


def write_atomically(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one step, through a temporary file in the same folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode("utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from None


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _decode(kind: Any, value: Any) -> Any:
    """Rebuilds a value of the annotated type ``kind`` from JSON data."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{key: _decode(hints[key], item) for key, item in value.items() if key in hints})
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _decode(arguments[1], item) for key, item in value.items()}
    if kind is float:
        return float(value)  # float() reads "inf", "-inf" and "nan"
    return value
