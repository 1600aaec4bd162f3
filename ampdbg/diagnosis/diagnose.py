"""From a record to its findings and verdict, in the order of decision: the first family that speaks is the root.

One exception: what replays show of a forward pass stands before misuses that cannot be behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampdbg.diagnosis.cause import CAUSES, LOST, nonfinite_loss
from ampdbg.diagnosis.decisions import Decision, Subject, holding
from ampdbg.diagnosis.dtype_contract import CASTS, CONTRACT, casts, contracts
from ampdbg.diagnosis.hidden_faults import HIDDEN, hidden_faults
from ampdbg.diagnosis.losses import risen
from ampdbg.diagnosis.misuse import autocast_errors, doubtful_misuses, misuses
from ampdbg.diagnosis.producers import UNKNOWN
from ampdbg.diagnosis.scale import LIMITS, SKIPS, UNTOLD, scalings, skips
from ampdbg.diagnosis.tensors import BATCHES, BUFFERS, DATA, STORED, WEIGHTS, bad_batch, bad_buffers, bad_weights
from ampdbg.diagnosis.trend import ahead
from ampdbg.diagnosis.updates import SMALL, SMALL_UPDATES, SPOILING, SUMS, half_updates
from ampdbg.formats import FLOAT32
from ampdbg.levels import format_of_config
from ampdbg.record.codes import CODES
from ampdbg.record.file import check_record
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Verdict

SPOILT = (WEIGHTS, SMALL_UPDATES)
"""What is told of weights that are not finite."""


@dataclass(frozen=True)
class Family:
    """Findings of one kind: ``find`` asks a record for them, by ``decisions`` where they are rows of a table."""

    title: str
    find: Callable[[Record], Iterator[Finding]]
    decisions: tuple[Decision[Any], ...] = ()


def _table(title: str, subjects: Callable[[Record], Iterable[Subject]], rows: tuple[Decision[Subject], ...]) -> Family:
    """Every row that holds of one of the subjects."""
    return Family(
        title, lambda record: (row.finding(one) for one in subjects(record) for row in holding(rows, one)), rows
    )


ORDER_OF_DECISION = (
    _table("Updates of half weights", half_updates, SPOILING),
    _table("Weights before a step", bad_weights, STORED),
    _table("The batch", bad_batch, BATCHES),
    Family("Calls in the wrong order", misuses),
    Family("Errors that autocast causes", autocast_errors),
    Family("A failing step, by its replays", nonfinite_loss, CAUSES),
    Family("Lost losses without replays", lambda _: iter(()), LOST),
    _table("Buffers after a step", bad_buffers, BUFFERS),
    Family("Skipped steps", skips, SKIPS),
    _table("The loss scale at the end", scalings, LIMITS),
    _table("Gradients that half adds up", half_updates, SUMS),
    _table("A healthy step, by its replays", hidden_faults, HIDDEN),
    _table("Updates that half weights lose", half_updates, SMALL),
    _table("Buffers that were cast with the model", casts, CASTS),
    _table("What was asked for", contracts, CONTRACT),
    Family("Calls that do little harm", doubtful_misuses),
    Family("What grows towards a limit", ahead),
)


def conditions_of(code: str) -> tuple[str, ...]:
    """When a code is found, in the order of decision: a condition each, in words."""
    return tuple(one.when for family in ORDER_OF_DECISION for one in family.decisions if one.code == code)


def diagnose(record: Record) -> Record:
    """The record with its findings, the root cause first, and its verdict; nothing is run.

    Raises:
        TypeError: this is no record.
    """
    check_record(record, "diagnose(record)")
    faults: list[Finding] = []
    information: list[Finding] = []
    for family in ORDER_OF_DECISION:
        for finding in family.find(record):
            if finding.severity == "info":
                is_new = finding.code not in [known.code for known in information]
                information += [replace(finding, root=None)] * is_new
            # The replays of one step may show two families the same cause: it is reported once.
            elif finding not in [replace(known, root=finding.root) for known in faults]:
                leads = family.find is nonfinite_loss and _stands_before(finding, faults, record)
                faults = _led_by(finding, faults) if leads else [*faults, _behind(finding, faults, record)]
    # Information is left out where there are faults.
    found = tuple(_of_its_turn(_in_script(finding, record), record) for finding in faults or information)
    verdict = _verdict(record, found)
    rises = (risen([step.loss for step in timeline.steps]) for timeline in record.timelines)
    note = next(filter(None, rises), "") if verdict == "healthy" else ""
    notes = (*record.unseen.notes, *[note] * (note not in ("", *record.unseen.notes)))
    return replace(record, findings=found, verdict=verdict, unseen=replace(record.unseen, notes=notes))


def _in_script(finding: Finding, record: Record) -> Finding:
    """The finding; a remedy that is an option of ``scan`` in the words of who owns a script."""
    if record.script is None or finding.remedy != CODES[UNKNOWN].remedy:
        return finding
    if _was_in_fp32(record):
        return replace(finding, remedy="look at the formula, the data and the learning rate: this was FP32 already")
    switches = "autocast(enabled=False) and GradScaler(enabled=False)"
    return replace(finding, remedy=f"compare with a run in FP32: {switches}")


def _of_its_turn(finding: Finding, record: Record) -> Finding:
    """The finding; where several optimizers take turns with the iteration, for loops count those."""
    iterations = [step.iteration for step in record.steps if step.step == finding.step and len(record.timelines) > 1]
    turn = {"iteration": iterations[0]} if iterations else {}
    return replace(finding, evidence={**finding.evidence, **turn})


def _stands_before(finding: Finding, faults: list[Finding], record: Record) -> bool:
    """Replays show why the forward pass fails, and nothing found so far can be behind that.

    Clipping too early, for one, makes no loss NaN: the weights move less than they should, and that is all.
    """
    shown = finding.phase == "forward" and finding.code != UNKNOWN
    made_later = SPOILT if record.script is None else (*SPOILT, DATA)
    return shown and not any(_precedes(known, finding, made_later) for known in faults)


def _precedes(known: Finding, finding: Finding, made_later: Collection[str]) -> bool:
    """A fault may be behind one of a forward pass: weights that a later step has spoilt are not, nor is what a
    script is given later, for it may be the model's, as in reinforcement learning."""
    is_later = known.code in made_later and known.step > finding.step
    return CODES[known.code].harms_forward and not is_later


def _led_by(finding: Finding, faults: list[Finding]) -> list[Finding]:
    """The faults behind one that they do not explain, nor it them; weights that a later step has spoilt follow it."""
    behind = [replace(known, root=None if known.root is None else known.root + 1) for known in faults]
    return [finding, *(replace(known, root=0) if known.code in (*SPOILT, DATA) else known for known in behind)]


def _behind(finding: Finding, faults: list[Finding], record: Record) -> Finding:
    """The finding with the fault that it follows from. What an op does in a step that is withheld leaves nothing to
    follow from to another one."""
    withheld = {step.step for step in record.steps if step.skipped and math.isfinite(step.loss)}
    are_apart = bool(faults) and finding.root is None and faults[0].step != finding.step
    if are_apart and all(one.op and one.phase == "backward" and one.step in withheld for one in (faults[0], finding)):
        return finding
    return replace(finding, root=_root(finding, faults))


def _root(finding: Finding, faults: list[Finding]) -> int | None:
    """What a later family finds follows from what an earlier one found: from the first fault, as a rule.

    Only what FP16 did in an earlier step cannot follow from what it did in a later one: it stands beside it, and a
    scale that began to fall there follows from it.
    """
    if not faults:
        return None
    is_of_fp16 = _is_of_precision(finding)
    if not _is_of_precision(faults[0]) or faults[0].step <= finding.step or not (is_of_fp16 or finding.root == 0):
        return 0
    if is_of_fp16:
        return None
    return next((index for index, cause in enumerate(faults) if cause.root is None and cause.step <= finding.step), 0)


def _is_of_precision(finding: Finding) -> bool:
    return CODES[finding.code].verdict == "precision"


def _verdict(record: Record, found: Sequence[Finding]) -> Verdict:
    faults = [finding for finding in found if finding.severity != "info"]
    if not faults:
        shows_nothing = (
            any(UNTOLD in finding.evidence for finding in found)
            or record.took_no_step
            or (record.script and not record.steps)
        )
        return "inconclusive" if record.error or shows_nothing else "healthy"
    verdict, finite_in_fp32 = CODES[faults[0].code].verdict, faults[0].evidence.get("finite_in_fp32")
    if faults[0].code == UNKNOWN and _was_in_fp32(record):
        return "other"
    if verdict == "inconclusive" and finite_in_fp32 is not None:
        return "precision" if finite_in_fp32 else "other"
    return verdict


def _was_in_fp32(record: Record) -> bool:
    return format_of_config(record.config) is FLOAT32 or record.environment.policy == "none"
