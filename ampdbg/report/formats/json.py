"""A record as JSON, as it is kept in its file."""

from __future__ import annotations

from ampdbg.record.file import to_json
from ampdbg.record.run import Record
from ampdbg.report.view import CommandContext, Look


def write(record: Record, typed: CommandContext, look: Look) -> str:
    """Return the record itself; ``typed`` and ``look`` change nothing."""
    return to_json(record)
