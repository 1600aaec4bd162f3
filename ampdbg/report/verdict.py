"""The verdict of a record in one sentence, and the next command to type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ampdbg.formats import FLOAT32
from ampdbg.levels import format_of_config
from ampdbg.record.codes import FACTS, catalogued
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record

from . import quantities
from .next_command import with_option
from .quantities import counted
from .timeline import Timeline, timeline


@dataclass(frozen=True)
class Headline:
    """The first line of a report: a mark, a rich style for both, and one sentence."""

    mark: str
    style: str
    sentence: str


@dataclass(frozen=True)
class NextStep:
    """What to do next and the command for it; ``command`` is empty when there is none."""

    why: str
    command: str


LOOK: Mapping[str, tuple[str, str]] = {
    "healthy": ("✓", "bold green"),
    "precision": ("✗", "bold red"),
    "other": ("✗", "bold red"),
    "inconclusive": ("?", "bold yellow"),
}


def headline(record: Record) -> Headline:
    """One sentence made from the first finding and the verdict; a run that was stopped says so first."""
    mark, style = LOOK[record.verdict]
    if record.findings and record.verdict == "inconclusive" and record.findings[0].severity == "error":
        mark, style = LOOK["other"]
    sentence = _sentence(record)
    if record.interrupted or record.error:
        why = "Stopped by an error" if record.error else "Interrupted"
        planned = f" of {record.planned_steps}" if record.planned_steps else ""
        return Headline("!", "bold yellow", f"{why} after {len(record.steps)}{planned} steps. {sentence}".rstrip())
    return Headline(mark, style, sentence)


def _sentence(record: Record) -> str:
    if not record.findings:
        seen = timeline(record)
        state = "Healthy" if record.verdict == "healthy" else "Inconclusive"
        return f"{state}: {_skips(seen)}." if seen else "The run ended before its first step."
    finding = record.findings[0]
    code = catalogued(finding.code)
    template = code.information if finding.severity == "info" and code.information else code.headline
    return template.format(**_facts(finding, timeline(record)))


def _facts(finding: Finding, seen: Timeline | None) -> dict[str, str]:
    """What a headline may name (:data:`ampdbg.record.codes.FACTS`)."""
    facts = dict.fromkeys(FACTS, "") | {"step": str(finding.step), "phase": finding.phase, "skips": "no step ran"}
    if finding.module:
        facts["where"] = f" in {finding.module}"
    if seen is None:
        return facts
    first, last = quantities.scale(seen.first.scale), quantities.scale(seen.last.scale)
    is_settled = not (seen.last.skipped and len(seen.skipped) > 1)
    return facts | {
        "skips": _skips(seen),
        "losses": _losses(finding, seen),
        "first": first,
        "last": last,
        "falling": f", and the loss scale fell from {first} to {last}" if seen.last.scale < seen.first.scale else "",
        "settles": f"settled at {last}, which is normal" if is_settled else f"settles; at {last} it has not yet",
    }


def _skips(seen: Timeline) -> str:
    count = str(len(seen.skipped)) if seen.skipped else "none"
    return f"{count} of {counted(seen.steps, 'step')} skipped"


def _losses(finding: Finding, seen: Timeline) -> str:
    """The loss of the step, and how many losses are not finite."""
    here = next((step.loss for step in seen.bad_loss if step.step == finding.step), None)
    if here is None:
        return ""
    many = f"; {len(seen.bad_loss)} of {counted(seen.steps, 'loss', 'losses')} are not finite"
    return f", where the loss is {quantities.number(here)}{many if len(seen.bad_loss) > 1 else ''}"


SEARCHES = ("bisect", "suggest-fp32")
"""They take what a scan does not: a record, or a module file; the same command can be typed again."""


def next_step(record: Record, config: str, record_path: str) -> NextStep | None:
    """What to type next: a longer run when healthy, the same run in FP32 where it is suspected, else the counts."""
    again = f"ampdbg {record.command if record.command in SEARCHES else 'scan'} {config}"
    if record.error:
        return NextStep("once that is repaired", again)
    if record.verdict == "healthy":
        return NextStep("a longer run", with_option(again, "--steps", 10 * max(record.planned_steps, 1)))
    bad_tensors = any(step.nonfinite for step in record.steps)
    if format_of_config(record.config) is FLOAT32 or (record.verdict == "other" and bad_tensors):
        counts = f"ampdbg report {record_path} --format json"
        return NextStep("every count of every step", counts) if record_path else None
    if record.verdict == "other":
        return NextStep("once that is repaired", again)
    if record.verdict == "precision" and all(catalogued(found.code).pin_helps for found in record.findings[:1]):
        return NextStep("the smallest set of modules to run in FP32, found by experiment", f"ampdbg bisect {config}")
    return NextStep(
        "the same run in FP32; if it fails too, precision is not the cause",
        with_option(again, "--set", "precision.level=O0"),
    )
