"""The verdict of a record in one sentence, and the next command to type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ampdbg.formats import FLOAT32
from ampdbg.levels import format_of_config
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


Sentence = Callable[[Finding, Timeline], str]


def _skips(seen: Timeline) -> str:
    if not seen.skipped:
        return f"none of {counted(seen.steps, 'step')} skipped"
    return f"{len(seen.skipped)} of {counted(seen.steps, 'step')} skipped"


def _calibration(finding: Finding, seen: Timeline) -> str:
    scale = quantities.scale(seen.last.scale)
    if finding.severity == "error":
        return f"The static loss scale {scale} is too large: {_skips(seen)}."
    if seen.last.skipped and len(seen.skipped) > 1:
        return f"Healthy so far: {_skips(seen)} while the loss scale settles; at {scale} it has not yet."
    return f"Healthy: {_skips(seen)} while the loss scale settled at {scale}, which is normal."


def _collapse(finding: Finding, seen: Timeline) -> str:
    first, last = quantities.scale(seen.first.scale), quantities.scale(seen.last.scale)
    return f"The loss scale keeps falling: {first} at first, {last} at the end, {_skips(seen)}."


def _forward(finding: Finding, seen: Timeline) -> str:
    start = f"The forward pass goes non-finite at step {finding.step}"
    if not seen.bad_loss:
        return f"{start}."
    value = quantities.number(seen.bad_loss[0].loss)
    return f"{start}: the loss is {value} there, non-finite in {len(seen.bad_loss)} of {counted(seen.steps, 'step')}."


def _backward(finding: Finding, seen: Timeline) -> str:
    first, last = seen.first.scale, seen.last.scale
    falling = f", and the loss scale fell from {quantities.scale(first)} to {quantities.scale(last)}"
    return f"Gradients go non-finite although the loss is finite: {_skips(seen)}{falling if last < first else ''}."


def _data(finding: Finding, seen: Timeline) -> str:
    return f"Bad data: the batch of step {finding.step} holds inf or NaN before the model sees it."


def _weights(finding: Finding, seen: Timeline) -> str:
    return f"Bad weights: parameters or buffers are non-finite before the forward pass of step {finding.step}."


def _buffer(finding: Finding, seen: Timeline) -> str:
    return f"A buffer turns non-finite at step {finding.step} and stays so, although the weights are finite."


BY_CODE: Mapping[str, Sentence] = {
    "forward-overflow": _forward,
    "gradient-overflow": _backward,
    "scale-calibration": _calibration,
    "scale-collapse": _collapse,
    "data-nonfinite": _data,
    "weights-nonfinite": _weights,
    "buffer-poisoned": _buffer,
}
"""Any other code is told by its own message."""

UNKNOWN_BY_PHASE: Mapping[str, Sentence] = {"forward": _forward, "backward": _backward}

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
    seen = timeline(record)
    if seen is None:
        return _told(record.findings[0]) if record.findings else "No step was seen."
    if not record.findings:
        return f"{'Healthy' if record.verdict == 'healthy' else 'Inconclusive'}: {_skips(seen)}."
    finding = record.findings[0]
    sentence = _unknown(record) if finding.code == "unknown" else BY_CODE.get(finding.code)
    return sentence(finding, seen) if sentence else _told(finding)


def _unknown(record: Record) -> Sentence | None:
    """What users see first is the falling scale; the finding below the headline tells why it falls."""
    phase = record.findings[0].phase
    if phase == "backward" and any(finding.code == "scale-collapse" for finding in record.findings):
        return _collapse
    return UNKNOWN_BY_PHASE.get(phase)


def _told(finding: Finding) -> str:
    message = finding.message[:1].upper() + finding.message[1:]
    return f"{message.rstrip('.')}, at step {finding.step}."


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
    if record.verdict == "precision" and not any(found.code == "gradient-underflow" for found in record.findings[:1]):
        return NextStep("the smallest set of modules to run in FP32, found by experiment", f"ampdbg bisect {config}")
    return NextStep(
        "the same run in FP32; if it fails too, precision is not the cause",
        with_option(again, "--set", "precision.level=O0"),
    )
