"""Compute the findings and the verdict of a record, family by family. The first fault is the root cause. One
exception: replays can show why a forward pass fails. They come before misuses that cannot be the cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampdbg.diagnosis.cause import CAUSES, ITSELF, LOST, nonfinite_loss
from ampdbg.diagnosis.decisions import Decision, Subject, holding
from ampdbg.diagnosis.dtype_contract import CASTS, CONTRACT, COUNTS, casts, contracts, counts
from ampdbg.diagnosis.hidden_faults import HIDDEN, hidden_faults
from ampdbg.diagnosis.losses import leapt, losses_of, risen
from ampdbg.diagnosis.misuse import autocast_errors, doubtful_misuses, misuses
from ampdbg.diagnosis.producers import UNKNOWN
from ampdbg.diagnosis.scale import LIMITS, MANY_UNEXPLAINED, SKIPS, scalings, skips
from ampdbg.diagnosis.tensors import BATCHES, BUFFERS, DATA, STORED, WEIGHTS, bad_batch, bad_buffers, bad_weights
from ampdbg.diagnosis.trend import ahead
from ampdbg.diagnosis.updates import SMALL, SMALL_UPDATES, SPOILING, SUMS, half_updates
from ampdbg.formats import FLOAT32
from ampdbg.levels import format_of_config
from ampdbg.quantities import listed
from ampdbg.record.codes import CODES, catalogued
from ampdbg.record.file import check_record
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Verdict

SPOILT = (WEIGHTS, SMALL_UPDATES)
"""The codes for non-finite weights."""


REFUSED = "FP32 was refused ({}): what takes only half ran in half there, and all else in FP32"
"""The note on a step whose code takes only half tensors."""


@dataclass(frozen=True)
class Family:
    """Findings of one kind. ``find`` yields them for a record; ``decisions`` are the rows of its table, if it has
    one."""

    title: str
    find: Callable[[Record], Iterator[Finding]]
    decisions: tuple[Decision[Any], ...] = ()


def _table(title: str, subjects: Callable[[Record], Iterable[Subject]], rows: tuple[Decision[Subject], ...]) -> Family:
    """Return a family with a finding for every row that holds for a subject."""
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
    _table("Counts in half", counts, COUNTS),
    _table("What was asked for", contracts, CONTRACT),
    Family("Calls that do little harm", doubtful_misuses),
    Family("What grows towards a limit", ahead),
)


def conditions_of(code: str) -> tuple[str, ...]:
    """Return the conditions under which a code is found, in words and in the order of decision."""
    return tuple(one.when for family in ORDER_OF_DECISION for one in family.decisions if one.code == code)


def diagnose(record: Record) -> Record:
    """Return the record with its findings, the root cause first, and its verdict. Nothing runs.

    Raises:
        TypeError: the argument is not a record.
    """
    check_record(record, "diagnose(record)")
    faults: list[Finding] = []
    information: list[Finding] = []
    for family in ORDER_OF_DECISION:
        for finding in family.find(record):
            if finding.severity == "info":
                is_new = finding.code not in [known.code for known in information]
                information += [replace(finding, root=None)] * is_new
            # Two families may find the same cause in the replays of one step: it is reported once.
            elif finding not in [replace(known, root=finding.root) for known in faults]:
                is_of_loss = family.find is nonfinite_loss and finding.root is None
                leads = is_of_loss and _is_new_root(finding, faults, record)
                faults = (
                    _with_new_root_first(finding, faults) if leads else [*faults, _with_root(finding, faults, record)]
                )
    # Information is omitted if there are faults.
    found = tuple(_with_iteration(_with_script_remedy(finding, record), record) for finding in faults or information)
    verdict = _verdict(record, found)
    rises = (risen(losses_of(timeline.steps)) for timeline in record.timelines)
    is_sound = all(finding.severity != "error" for finding in found)
    note = next(filter(None, rises), "") if is_sound and not record.error else ""
    refusals = (REFUSED.format(made.reference.refusal) for made in record.investigations if made.reference.refusal)
    notes = tuple(filter(None, dict.fromkeys((*record.unseen.notes, *refusals, note))))
    return replace(record, findings=found, verdict=verdict, unseen=replace(record.unseen, notes=notes))


def _with_script_remedy(finding: Finding, record: Record) -> Finding:
    """Return the finding with a remedy for the owner of a script instead of an option of ``ampdbg scan``."""
    if record.script is None or finding.remedy != CODES[UNKNOWN].remedy:
        return finding
    if _was_in_fp32(record):
        return replace(finding, remedy="look at the formula, the data and the learning rate: this was FP32 already")
    ways = (
        ("float32 weights", bool(record.half_weights)),
        ("autocast(enabled=False)", not record.half_weights),
        ("GradScaler(enabled=False)", any(step.scaler for step in record.steps)),
    )
    return replace(finding, remedy=f"compare with a run in FP32: {listed([way for way, holds in ways if holds])}")


def _with_iteration(finding: Finding, record: Record) -> Finding:
    """Return the finding, with the iteration as evidence if several optimizers take turns."""
    are_several = any(step.others or step.optimizer for step in record.steps)  # a replay has one optimizer's steps
    iterations = [step.iteration for step in record.steps if step.step == finding.step and are_several]
    turn = {"iteration": iterations[0]} if iterations else {}
    return replace(finding, evidence={**finding.evidence, **turn})


def _is_new_root(finding: Finding, faults: list[Finding], record: Record) -> bool:
    """True if replays show why the forward pass fails, and no earlier fault can be the cause.

    For example, clipping too early makes no loss NaN. It only makes the updates too small. Weights that a later step
    spoils are not the cause either. In a script, neither is a later input, because the model may have produced it, as
    in reinforcement learning.
    """
    made_later = SPOILT if record.script is None else (*SPOILT, DATA)
    before = [one for one in faults if one.code not in made_later or one.step <= finding.step]
    is_harmed = any(catalogued(one.code).harms_forward for one in before)
    return finding.phase == "forward" and finding.code != UNKNOWN and not is_harmed


def _with_new_root_first(finding: Finding, faults: list[Finding]) -> list[Finding]:
    """Return the faults after ``finding``, which becomes a root. Weights spoilt by a later step follow from it."""
    behind = [replace(known, root=None if known.root is None else known.root + 1) for known in faults]
    return [finding, *(replace(known, root=0) if known.code in (*SPOILT, DATA) else known for known in behind)]


def _with_root(finding: Finding, faults: list[Finding], record: Record) -> Finding:
    """Return the finding with the index of its root: the first independent fault of its optimizer, else of any.

    An FP16 fault in a later step cannot explain one in an earlier step. The earlier fault is independent, and explains
    what began there, such as the fall of a loss scale. An op in a withheld step changes no weights, so it explains no
    other step.
    """
    withheld = {step.step for step in record.steps if step.skipped and math.isfinite(step.loss)}
    without_a_trace = (one.step for one in faults[:1] if one.op and one.phase == "backward" and one.step in withheld)
    is_apart = finding.root is None and bool(finding.op) and any(step != finding.step for step in without_a_trace)
    if finding.root == ITSELF or is_apart:
        return replace(finding, root=None)
    is_of_fp16, optimizers = _is_of_precision(finding), {step.step: step.optimizer for step in record.steps}
    roots = [(index, cause) for index, cause in enumerate(faults) if cause.root is None]
    roots.sort(key=lambda one: optimizers.get(one[1].step) != optimizers.get(finding.step))
    known = roots[: 1 if is_of_fp16 else None]
    before = (index for index, one in known if not _is_of_precision(one) or one.step <= finding.step)
    return replace(finding, root=next(before, None if is_of_fp16 or not faults else 0))


def _is_of_precision(finding: Finding) -> bool:
    return catalogued(finding.code).verdict == "precision"


def _verdict(record: Record, found: Sequence[Finding]) -> Verdict:
    fault = next((finding for finding in found if finding.severity != "info"), None)
    if fault is None:
        is_open = record.error or any(MANY_UNEXPLAINED in finding.evidence for finding in found)
        is_open = is_open or any(one.took_no_step or leapt(losses_of(one.steps)) for one in record.timelines)
        return "inconclusive" if is_open or (record.script and not record.steps) else "healthy"
    verdict, in_fp32 = catalogued(fault.code).verdict, fault.evidence.get("finite_in_fp32")
    if fault.code == UNKNOWN and _was_in_fp32(record):
        return "other"
    by_fp32: dict[object, Verdict] = {True: "precision", False: "other"}
    return by_fp32.get(in_fp32, verdict) if verdict == "inconclusive" else verdict


def _was_in_fp32(record: Record) -> bool:
    return format_of_config(record.config) is FLOAT32 or record.environment.policy == "none"
