"""The page of a scan: its headline, findings, loss scale, non-finite gradients and tensors, and what to type next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ampdbg.formats import FLOAT32
from ampdbg.levels import format_of_config
from ampdbg.quantities import counted, duration, number, scale
from ampdbg.record.codes import FACTS, catalogued
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Step, TensorCounts
from ampdbg.report.explanation import explanation

from . import view
from .groups import group_table
from .view import line, more, ran_on, with_option

MAX_TENSORS = 8

TONES: Mapping[str, view.Tone] = {"healthy": "good", "precision": "bad", "other": "bad", "inconclusive": "doubtful"}
"""The tone of a headline by the record's verdict."""

SEARCHES = ("bisect", "suggest-fp32")
"""They take what a scan does not: a record, or a module file; the same command can be typed again."""

TENSOR_COLUMNS = (
    view.Column("tensor"),
    view.Column("steps", "number"),
    view.Column("first", "number"),
    view.Column("inf", "number"),
    view.Column("NaN", "number"),
    view.Column("of", "number"),
    view.Column("at", "sign"),
)


def page(record: Record, typed: view.Typed) -> view.Page:
    """What a scan says of its run."""
    return view.Page(
        headline(record),
        tuple(_sections(record)),
        (" · ".join(_facts(record)), *ran_on(record)),
        typed.record_path,
        next_command(record, typed),
    )


def _sections(record: Record) -> Iterator[view.Section]:
    if record.error:
        first, *others = record.error.splitlines()
        yield view.Paragraph((line(first, tone="bad"), *(line(text, tone="bad", depth=1) for text in others)))
    if record.findings:
        yield view.Findings(record.findings)
    if any(step.skipped or not math.isfinite(step.loss) for step in record.steps):
        yield view.ScaleChart("Loss scale", record.steps)
    groups = group_table(record)
    if groups is not None:
        yield groups
    tensors = list(bad_tensors(record.steps))
    if tensors:
        yield _tensor_table(tensors)


# The headline


def headline(record: Record) -> view.Headline:
    """One sentence made from the first finding and the verdict; a run that was stopped says so first."""
    tone, sentence = TONES[record.verdict], _sentence(record)
    if record.findings and record.verdict == "inconclusive" and record.findings[0].severity == "error":
        tone = "bad"
    if record.interrupted or record.error:
        why = "An error stopped the run" if record.error else "Interrupted"
        planned = f" of {record.planned_steps:,}" if record.planned_steps else ""
        return view.Headline("stopped", f"{why} after {len(record.steps):,}{planned} steps. {sentence}".rstrip())
    return view.Headline(tone, sentence)


def _sentence(record: Record) -> str:
    if record.findings:
        finding = record.findings[0]
        code = catalogued(finding.code)
        template = code.information if finding.severity == "info" and code.information else code.headline
        template = template or f"{explanation(code.name).title}, at step {{step}}."
        return template.format(**_headline_facts(finding, record.steps))
    if not record.steps:
        return "The run ended before its first step."
    return f"{'Healthy' if record.verdict == 'healthy' else 'Inconclusive'}: {_skips(record.steps)}."


def _headline_facts(finding: Finding, steps: tuple[Step, ...]) -> dict[str, str]:
    """What a headline may name (:data:`ampdbg.record.codes.FACTS`)."""
    facts = dict.fromkeys(FACTS, "") | {"step": str(finding.step), "phase": finding.phase, "skips": "no step ran"}
    if finding.module:
        facts["where"] = f" in {finding.module}"
    if not steps:
        return facts
    first, last = scale(steps[0].scale), scale(steps[-1].scale)
    is_settled = not (steps[-1].skipped and sum(step.skipped for step in steps) > 1)
    return facts | {
        "skips": _skips(steps),
        "losses": _losses(finding, steps),
        "first": first,
        "last": last,
        "falling": f", and the loss scale fell from {first} to {last}" if steps[-1].scale < steps[0].scale else "",
        "settles": f"settled at {last}, which is normal" if is_settled else f"settles; at {last} it has not yet",
    }


def _skips(steps: tuple[Step, ...]) -> str:
    return f"{sum(step.skipped for step in steps) or 'none'} of {counted(len(steps), 'step')} skipped"


def _losses(finding: Finding, steps: tuple[Step, ...]) -> str:
    """The loss of the step, and how many losses are not finite."""
    bad = [step for step in steps if not math.isfinite(step.loss)]
    here = next((step.loss for step in bad if step.step == finding.step), None)
    if here is None:
        return ""
    many = f"; {len(bad)} of {counted(len(steps), 'loss')} are not finite" if len(bad) > 1 else ""
    return f", where the loss is {number(here)}{many}"


# Batches, parameters and buffers with inf or NaN


@dataclass(frozen=True)
class BadTensor:
    """A non-finite tensor: the first step that shows it, its counts there, and how many steps show it."""

    step: int
    counts: TensorCounts
    steps: int


def bad_tensors(steps: Iterable[Step]) -> Iterable[BadTensor]:
    """Each tensor once, the earliest first."""
    tensors: dict[tuple[str, str], BadTensor] = {}
    for step in steps:
        for counts in step.nonfinite:
            known = tensors.get((counts.kind, counts.name), BadTensor(step.step, counts, 0))
            tensors[counts.kind, counts.name] = replace(known, steps=known.steps + 1)
    return tensors.values()


def _tensor_table(tensors: list[BadTensor]) -> view.Table:
    rows = tuple(_tensor_row(tensor.counts, tensor) for tensor in tensors[:MAX_TENSORS])
    below = more(len(tensors) - MAX_TENSORS)
    return view.Table("Non-finite tensors, before or after a step", TENSOR_COLUMNS, rows, below=below)


def _tensor_row(counts: TensorCounts, tensor: BadTensor) -> tuple[str, ...]:
    at = f"[{', '.join(map(str, counts.first_index))}]" if counts.first_index else ""
    if at and counts.kind == "batch":
        at = f"sample {counts.first_index[0]}, {at}"
    name, first = f"{counts.kind} {counts.name}".rstrip(), f"{counts.when} {tensor.step}"
    return (name, f"{tensor.steps:,}", first, *(f"{count:,}" for count in (counts.inf, counts.nan, counts.size)), at)


# The end


def _facts(record: Record) -> Iterator[str]:
    yield counted(len(record.steps), "step")
    if record.steps:
        first, last = record.steps[0], record.steps[-1]
        yield f"{sum(step.skipped for step in record.steps):,} skipped"
        yield f"loss {_change(number(first.loss), number(last.loss))}"
        if last.grad_norm is not None:
            yield f"gradient norm {number(last.grad_norm)}"
        yield f"loss scale {_change(scale(first.scale), scale(last.scale))}"
    yield duration(record.elapsed)


def _change(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def next_command(record: Record, typed: view.Typed) -> view.NextCommand | None:
    """What to type next: a longer run when healthy, the same run in FP32 where it is suspected, else the counts."""
    again = f"ampdbg {record.command if record.command in SEARCHES else 'scan'} {typed.config}"
    if record.error:
        return view.NextCommand("run it again once that is repaired", again)
    if record.verdict == "healthy":
        longer = with_option(again, "--steps", 10 * max(record.planned_steps, 1))
        return view.NextCommand("run it for longer", longer)
    has_bad_tensors = any(step.nonfinite for step in record.steps)
    if format_of_config(record.config) is FLOAT32 or (record.verdict == "other" and has_bad_tensors):
        counts = f"ampdbg report {typed.record_path} --format json"
        return view.NextCommand("read every count of every step", counts) if typed.record_path else None
    if record.verdict == "other":
        return view.NextCommand("run it again once that is repaired", again)
    if record.verdict == "precision" and any(catalogued(finding.code).pin_helps for finding in record.findings[:1]):
        return view.NextCommand(
            "find the fewest modules that need FP32, by experiment", f"ampdbg bisect {typed.config}"
        )
    fp32 = with_option(again, "--set", "precision.level=O0")
    return view.NextCommand("run the same in FP32; if that fails too, precision is not the cause", fp32)
