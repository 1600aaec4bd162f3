"""Findings about calls: those in the wrong order, and errors that autocast causes; the catalogue has their words."""

from __future__ import annotations

from collections.abc import Iterator

from ampdbg.record.codes import CODES, Code, finding_of
from ampdbg.record.findings import Finding, Severity
from ampdbg.record.run import Misuse, Record


def misuses(record: Record) -> Iterator[Finding]:
    """Misuses that corrupt the training: nothing that follows them says anything about precision."""
    return (finding for finding in _findings(record) if finding.severity == "error")


def doubtful_misuses(record: Record) -> Iterator[Finding]:
    """Misuses that do little harm: they explain nothing else, and come last."""
    return (finding for finding in _findings(record) if finding.severity != "error")


def autocast_errors(record: Record) -> Iterator[Finding]:
    """An exception that autocast causes: a finding, because the same code runs in FP32."""
    error = record.autocast_error
    if error is not None:
        message = error.message.partition("\n")[0]
        yield finding_of(
            error.code, error.step, "forward", message, severity="error", module=error.module, source=error.source
        )


def _findings(record: Record) -> Iterator[Finding]:
    # An error that ended the run has a finding of its own, with the same line.
    reported = record.autocast_error.code if record.autocast_error else ""
    steps = record.steps_run
    for found in record.misuses:
        if found.code == reported or found.code not in CODES:
            continue
        code = CODES[found.code]
        times = f" ({found.count} times)" if found.count > 1 and code.is_counted else ""
        refused = f"; torch says: {found.raised}" if found.raised else ""
        yield finding_of(
            code.name,
            found.step,
            "optimizer",
            f"{code.message}{times}{refused}",
            severity=_severity(found, code, steps),
            source=found.source,
            evidence={"count": found.count, "steps": steps},
        )


def _severity(found: Misuse, code: Code, steps: int) -> Severity:
    """What torch refuses ends the run."""
    if found.raised:
        return "error"
    if found.count < code.harmless_share * steps:
        return "info"
    return code.severity
