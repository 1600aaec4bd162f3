"""A record as text for a terminal: verdict, findings, loss-scale chart, overflowing groups, summary, next command."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from ampdbg.record.findings import Source
from ampdbg.record.pins import Pin
from ampdbg.record.run import Record

from . import quantities
from .chart import Kind, scale_chart
from .drawing import draw
from .finding_text import findings_text
from .group_text import groups_text
from .groups import overflows
from .layout import INDENT, title, verbatim
from .quantities import counted
from .tensor_text import sightings, tensors_text
from .timeline import timeline
from .verdict import headline, next_step

CHART_STYLE: dict[Kind, str] = {"scale": "cyan", "axis": "dim", "skipped": "yellow", "nonfinite": "bold red"}


def render_text(
    record: Record,
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    config: str = "CONFIG",
    record_path: str = "",
    folder: str = "",
) -> str:
    """Renders a record for a terminal of ``width`` columns, with ANSI colours if ``color``.

    ``unicode=False`` draws with ASCII alone. ``config`` and ``record_path`` stand in the commands that the
    report suggests; a record does not know them. Source files below ``folder`` are named relative to it.
    """
    record = named_from(folder, record)
    return draw(_sections(record, width, config, record_path), width=width, color=color, unicode=unicode)


def named_from(folder: str, record: Record) -> Record:
    """The record with the source files below ``folder`` named as they are typed there."""
    findings = tuple(replace(finding, source=source_from(folder, finding.source)) for finding in record.findings)
    sites = tuple(replace(site, source=source_from(folder, site.source)) for site in record.sites)
    return replace(record, findings=findings, sites=sites, pins=tuple(_pin_from(folder, pin) for pin in record.pins))


def _pin_from(folder: str, pin: Pin) -> Pin:
    sites = tuple(replace(site, source=source_from(folder, site.source)) for site in pin.sites)
    return replace(pin, source=source_from(folder, pin.source), sites=sites)


def source_from(folder: str, source: Source | None) -> Source | None:
    """A source file below ``folder``, named as it is typed there; any other as it was."""
    start = folder.rstrip("/\\")
    if not start or source is None or not source.file.startswith((start + "/", start + "\\")):
        return source
    return replace(source, file=source.file[len(start) + 1 :])


def _sections(record: Record, width: int, config: str, record_path: str) -> Iterator[RenderableType]:
    first = headline(record)
    yield Text(f"{first.mark} {first.sentence}", style=first.style)
    if record.error:
        yield Text(record.error, style="bold red")
    if record.findings:
        yield Group(*findings_text(record.findings))
    if _worth_a_chart(record):
        yield _chart(record, width)
    seen = overflows(record)
    if seen.everywhere or seen.local:
        yield Group(*groups_text(record, seen))
    tensors = sightings(record.steps)
    if tensors:
        yield tensors_text(tensors)
    yield Group(*_summary(record, config, record_path))


def _worth_a_chart(record: Record) -> bool:
    return any(step.skipped or not math.isfinite(step.loss) for step in record.steps)


def _chart(record: Record, width: int) -> RenderableType:
    lines = (verbatim(line.text, CHART_STYLE[line.kind]) for line in scale_chart(record.steps, width))
    return Group(title("Loss scale"), *lines)


def _summary(record: Record, config: str, record_path: str) -> Iterator[RenderableType]:
    yield Text(" · ".join(_facts(record)), style="dim")
    yield Text(" · ".join(environment_facts(record)), style="dim")
    for note in (*record.environment.notes, *record.unseen.notes):
        yield Text(f"Note: {note}", style="dim")
    if record_path:
        yield verbatim(f"Record: {record_path}", "dim")
    step = next_step(record, config, record_path)
    if step is not None:
        yield Text.assemble(("Next: ", "bold"), step.why)
        yield verbatim(step.command, "bold cyan", INDENT)


def _facts(record: Record) -> Iterator[str]:
    seen = timeline(record)
    yield counted(len(record.steps), "step")
    if seen is not None:
        yield f"{len(seen.skipped)} skipped"
        yield f"loss {_change(quantities.number(seen.first.loss), quantities.number(seen.last.loss))}"
        if seen.last.grad_norm is not None:
            yield f"gradient norm {quantities.number(seen.last.grad_norm)}"
        yield f"loss scale {_change(quantities.scale(seen.first.scale), quantities.scale(seen.last.scale))}"
    yield quantities.duration(record.elapsed)


def _change(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def environment_facts(record: Record) -> Iterator[str]:
    """What the run ran on, in a few words each."""
    environment = record.environment
    yield f"torch {environment.torch}"
    yield f"{environment.device} ({environment.device_name})" if environment.device_name else environment.device
    emulated = ", emulated" if environment.emulated else ""
    yield f"{environment.policy} autocast policy{emulated}"
