"""Run ``ampdbg lint``'s rules on the files of a run, and list on stderr what its record does not show."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampdbg.record.run import Record

from .streams import say

if TYPE_CHECKING:
    from ampdbg.lint.engine import LintFinding

MOST_FILES = 100
MOST_LINES = 5


def say_source_findings(record: Record, files: Iterable[str | Path], *, is_quiet: bool = False) -> None:
    """Print a line for each misuse in the source that the record does not name; an error here never disturbs a run."""
    try:
        found = [] if is_quiet else _beside(record, list(dict.fromkeys(map(str, files)))[:MOST_FILES])
    except Exception:  # noqa: BLE001 - what is said in addition must not cost the run its result
        return
    if found:
        say("ampdbg lint also found in the source:")
        for finding in found[:MOST_LINES]:
            say(f"  {os.path.relpath(finding.path)}:{finding.line}: {finding.code}: {finding.message}")
        more = f" ({len(found) - MOST_LINES} more)" if len(found) > MOST_LINES else ""
        say(f"  ampdbg lint {os.path.relpath(found[0].path)}{more}")


def _beside(record: Record, files: Sequence[str]) -> list[LintFinding]:
    """Return only misuse: an old spelling is not the cause of a failure."""
    from ampdbg.lint.engine import LintedFile, lint_file
    from ampdbg.lint.settings import Settings
    from ampdbg.record.codes import CODES, OLD

    known = {finding.code for finding in record.findings}
    lines = {(os.path.abspath(one.source.file), one.source.line) for one in record.findings if one.source}
    return [
        finding
        for file in files
        for finding in lint_file(LintedFile(file), Settings()).findings
        if finding.severity != "info"
        and CODES[finding.code].family != OLD
        and finding.code not in known
        and (os.path.abspath(file), finding.line) not in lines
    ]
