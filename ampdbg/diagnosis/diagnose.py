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
from ampdbg.formats import FLOAT32
from ampdbg.levels import format_of_config
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Verdict

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
    told: list[Finding] = []
    information: list[Finding] = []
    for family in ORDER_OF_DECISION:
        for finding in family(record):
            if finding.severity == "info":
                information.append(replace(finding, root=None))
            # What one step's replays show may be the cause of more than one thing: it is told once.
            elif finding not in [replace(known, root=finding.root) for known in told]:
                told.append(replace(finding, root=_root(finding, told)))
    # Information is left out where there is more to tell.
    return replace(record, findings=tuple(told or information), verdict=_verdict(record, told))


def _root(finding: Finding, told: list[Finding]) -> int | None:
    """What a later family finds follows from what was found before it: the first thing, as a rule.

    Only what FP16 did in an earlier step cannot follow from what it did in a later one: it stands beside it, and a
    scale that began to fall there follows from it.
    """
    if not told:
        return None
    of_fp16 = finding.code in PRECISION or finding.code == "scale-collapse"
    if not of_fp16 or told[0].code not in PRECISION or told[0].step <= finding.step:
        return 0
    if finding.code in PRECISION:
        return None
    return next((index for index, cause in enumerate(told) if cause.root is None and cause.step <= finding.step), 0)


def _verdict(record: Record, told: list[Finding]) -> Verdict:
    if not told:
        return "inconclusive" if record.error else "healthy"
    root = told[0]
    # Only a buffer that FP32 keeps finite has an op.
    if root.code in PRECISION or (root.code == "buffer-poisoned" and root.op):
        return "precision"
    fails_in_fp32 = format_of_config(record.config) is FLOAT32 or root.evidence.get("finite_in_fp32") is False
    if root.code.startswith(NO_PIN_HELPS) or fails_in_fp32:
        return "other"
    return "inconclusive"
