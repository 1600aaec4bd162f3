"""Findings about calls in the wrong order, and about errors that autocast causes. The catalogue has their texts."""

from __future__ import annotations

from collections.abc import Iterator

from ampdbg.diagnosis.cause import SKIPS_IN_A_ROW
from ampdbg.diagnosis.scale import scalings
from ampdbg.record.codes import CODES, finding_of
from ampdbg.record.findings import Finding, Severity
from ampdbg.record.run import Record
from ampdbg.source.ownership import lies_in_library


def misuses(record: Record) -> Iterator[Finding]:
    """Yield misuses that corrupt the training. Later failures say nothing about precision."""
    return (finding for finding in _findings(record) if finding.severity == "error")


def doubtful_misuses(record: Record) -> Iterator[Finding]:
    """Yield misuses that do little harm. They explain no finding, and come last."""
    return (finding for finding in _findings(record) if finding.severity != "error")


def autocast_errors(record: Record) -> Iterator[Finding]:
    """Yield the exception that autocast caused. It is a finding, because the same code runs in FP32."""
    error = record.autocast_error
    if error is not None:
        message = error.message.partition("\n")[0]
        yield finding_of(
            error.code, error.step, "forward", message, severity="error", module=error.module, source=error.source
        )


def _findings(record: Record) -> Iterator[Finding]:
    # An error that ended the run already has a finding with the same line.
    reported = {record.autocast_error.code if record.autocast_error else ""}
    for found in (one for one in record.misuses if one.code in CODES.keys() - reported):
        code = CODES[found.code]
        is_librarys = found.source is not None and lies_in_library(found.source.file)
        lows = (step for scaling in scalings(record) for step in scaling.lows)
        # A few skips at the start or right after growth, which every healthy run has.
        settles = found.count < SKIPS_IN_A_ROW and all(step.step < found.step for step in lows)
        is_rare = found.count < code.harmless_share * record.steps_run or settles
        is_harmless = (code.is_of_a_region and is_librarys) or (code.harmless_share > 0.0 and is_rare)
        severity: Severity = "info" if is_harmless else code.severity
        if found.raised:  # torch's error ends the run
            severity = "error"
        times = f", at {found.count} calls" if found.count > 1 and code.is_counted else ""
        refused = f"; torch says: {found.raised}" if found.raised else ""
        yield finding_of(
            code.name,
            found.step,
            "optimizer",
            f"{code.message}{times}{refused}",
            severity=severity,
            remedy=(is_librarys and code.remedy_in_library) or code.remedy,
            source=found.source,
            evidence={"count": found.count, "steps": record.steps_run},
        )
