"""From a record to its findings and verdict, in the order of decision: the first family that speaks is the root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ampdbg.diagnosis.forward import autocast_errors, nonfinite_loss
from ampdbg.diagnosis.half_weights import lost_updates, spoilt_weights
from ampdbg.diagnosis.hidden import hidden_faults
from ampdbg.diagnosis.misuse import doubtful_misuses, misuses
from ampdbg.diagnosis.scale import runaway, skips
from ampdbg.diagnosis.tensors import buffer_poisoned, data_nonfinite, weights_nonfinite
from ampdbg.findings import Finding
from ampdbg.record import Record, Verdict

Family = Callable[[Record], Iterator[Finding]]


ORDER_OF_DECISION: tuple[Family, ...] = (
    spoilt_weights,
    weights_nonfinite,
    data_nonfinite,
    misuses,
    autocast_errors,
    nonfinite_loss,
    buffer_poisoned,
    skips,
    runaway,
    hidden_faults,
    lost_updates,
    doubtful_misuses,
)

PRECISION = frozenset(
    """
    forward-overflow gradient-overflow silent-overflow eps-underflow precision-loss gradient-underflow
    no-usable-scale
    """.split()
)
"""Codes that mean FP16 is the cause."""

NO_PIN_HELPS = (
    "data-",
    "weights-nonfinite",
    "misuse-",
    "optimizer-underflow",
    "mask-constant",
    "true-nan",
    "infinite-loss",
    "divergence",
    "scale-",
)
"""Codes whose cause is known and is none of precision's: the verdict is ``other``."""


def diagnose(record: Record) -> Record:
    """The record with its findings, the root cause first, and its verdict; nothing is run."""
    findings: list[Finding] = []
    for family in ORDER_OF_DECISION:
        for finding in family(record):
            findings.append(_beside(finding, findings))
    findings = _told(findings) or findings
    return replace(record, findings=tuple(findings), verdict=_verdict(record, findings))


def _beside(finding: Finding, found: list[Finding]) -> Finding:
    """What a later family finds follows from the first thing that was found; information is no cause."""
    if finding.severity == "info" or not _told(found):
        return replace(finding, root=None)
    return replace(finding, root=0)


def _told(findings: list[Finding]) -> list[Finding]:
    """Everything but information, which is left out where there is more to tell."""
    return [finding for finding in findings if finding.severity != "info"]


def _verdict(record: Record, findings: list[Finding]) -> Verdict:
    told = _told(findings)
    if not told:
        return "inconclusive" if record.error else "healthy"
    root = told[0]
    # Only a buffer that FP32 keeps finite has an op.
    if root.code in PRECISION or (root.code == "buffer-poisoned" and root.op):
        return "precision"
    if root.code.startswith(NO_PIN_HELPS) or _ran_in_fp32(record):
        return "other"
    return "inconclusive"


def _ran_in_fp32(record: Record) -> bool:
    precision = record.config.get("precision", {})
    return bool(precision.get("level") == "O0" or precision.get("dtype") == "float32")
