"""A record as text for a terminal: verdict, findings, loss-scale chart, overflowing groups, summary, next command."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampdbg.findings import Finding
from ampdbg.record import Record, Step, TensorCounts

from . import quantities
from .chart import Kind, scale_chart
from .groups import GroupHits, Overflows, group_name, overflows, spared_groups
from .quantities import counted
from .timeline import timeline
from .verdict import headline, next_step

MAX_GROUPS = 12
MAX_TENSORS = 8
INDENT = 2

SEVERITY_STYLE = {"error": "red", "warning": "yellow", "info": "cyan"}
CHART_STYLE: dict[Kind, str] = {"scale": "cyan", "axis": "dim", "skipped": "yellow", "nonfinite": "bold red"}

# Every character beyond ASCII that a report's own text uses, for terminals that cannot show them.
ASCII = str.maketrans(
    {"━": "=", "┃": "|", "─": "-", "┤": "|", "└": "+", "×": "x", "·": "-", "…": "...", "✓": "+", "✗": "x"}
)


def render_text(
    record: Record,
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    config: str = "CONFIG",
    record_path: str = "",
) -> str:
    """Renders a record for a terminal of ``width`` columns, with ANSI colours if ``color``.

    ``unicode=False`` draws with ASCII alone. ``config`` and ``record_path`` stand in the commands that the
    report suggests; a record does not know them.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        force_jupyter=False,
        legacy_windows=False,
        emoji=False,
        markup=False,
        highlight=False,
        _environ={},
    )
    with console.capture() as capture:
        for number, section in enumerate(_sections(record, width, config, record_path)):
            if number:
                console.print()
            console.print(section)
    lines = (line.rstrip() for line in capture.get().splitlines())
    text = "\n".join(lines) + "\n"
    return text if unicode else text.translate(ASCII)


def _sections(record: Record, width: int, config: str, record_path: str) -> Iterator[RenderableType]:
    first = headline(record)
    yield Text(f"{first.mark} {first.sentence}", style=first.style)
    if record.findings:
        yield Group(*_findings(record.findings))
    if _worth_a_chart(record):
        yield _chart(record, width)
    seen = overflows(record)
    if seen.everywhere or seen.local:
        yield Group(*_groups(record, seen))
    sightings = _sightings(record.steps)
    if sightings:
        yield _tensors(sightings)
    yield Group(*_summary(record, config, record_path))


# Findings


def _findings(findings: tuple[Finding, ...]) -> Iterator[RenderableType]:
    for index, finding in enumerate(findings):
        if finding.root is None or not 0 <= finding.root < len(findings) or finding.root == index:
            yield _finding(finding)
            yield from (_follow_up(other) for other in findings if other.root == index and other is not finding)


def _finding(finding: Finding) -> RenderableType:
    title = Text.assemble((finding.severity, SEVERITY_STYLE[finding.severity]), " ", (finding.code, "bold"))
    title.append(f" · {' · '.join(_where(finding))}")
    lines: list[RenderableType] = [title, _indented(Text(finding.message))]
    if finding.source is not None:
        source = finding.source
        lines.append(_indented(Text(f"{source.file}:{source.line} in {source.function}", style="dim")))
        lines.append(_indented(Text(source.text.strip(), style="bold"), 2 * INDENT))
    if finding.remedy:
        lines.append(_indented(Text.assemble(("Remedy: ", "green"), finding.remedy)))
    return Group(*lines)


def _where(finding: Finding) -> Iterator[str]:
    yield f"step {finding.step}"
    yield finding.phase
    yield from (part for part in (finding.module, finding.op, finding.parameter) if part)


def _follow_up(finding: Finding) -> RenderableType:
    return _indented(Text(f"└ {finding.code} follows from it at step {finding.step}: {finding.message}", style="dim"))


# The loss-scale chart


def _worth_a_chart(record: Record) -> bool:
    return any(step.skipped or not math.isfinite(step.loss) for step in record.steps)


def _chart(record: Record, width: int) -> RenderableType:
    lines = (_verbatim(line.text, CHART_STYLE[line.kind]) for line in scale_chart(record.steps, width))
    return Group(_title("Loss scale"), *lines)


# Parameter groups


def _groups(record: Record, seen: Overflows) -> Iterator[RenderableType]:
    steps = len(seen.everywhere) + len(seen.local)
    yield _title(f"Non-finite gradients, in {steps} of {counted(len(record.steps), 'step')}")
    if seen.local:
        if seen.narrowest is not None and len(seen.narrowest.groups) < min(MAX_GROUPS, len(seen.hits)):
            yield _narrowest(seen.narrowest, seen.total)
        yield _group_table(seen)
        if len(seen.hits) > MAX_GROUPS:
            yield _indented(Text(f"… and {len(seen.hits) - MAX_GROUPS} more groups (all in the record)", style="dim"))
    if seen.everywhere:
        yield _everywhere(record, seen)


def _narrowest(step: Step, total: int) -> RenderableType:
    """The step that localises best: few groups at once are near the cause, many are its wake."""
    names = quantities.listed(tuple(group_name(group.name, group.index) for group in step.groups))
    return _indented(
        Text.assemble(f"Fewest at once, at step {step.step}: {len(step.groups)} of {total}: ", (names, "bold"))
    )


def _group_table(seen: Overflows) -> RenderableType:
    table = _table("group", "steps", "first", "inf", "NaN", "worst share")
    for hit in seen.hits[:MAX_GROUPS]:
        table.add_row(
            _group_name(hit),
            f"{hit.steps} of {len(seen.local)}",
            str(hit.first),
            str(hit.inf),
            str(hit.nan),
            quantities.share(hit.inf + hit.nan, hit.size),
        )
    return _indented(table)


def _group_name(hit: GroupHits) -> str:
    """The group, and the worst of its parameters unless that is the group's own name."""
    name = group_name(hit.name, hit.index)
    if hit.worst in ("", name):
        return name
    others = f" +{hit.parameters - 1}" if hit.parameters > 1 else ""
    return f"{name} ({hit.worst}{others})"


def _everywhere(record: Record, seen: Overflows) -> RenderableType:
    steps = seen.everywhere
    spared = spared_groups(record, steps)
    which = f"All {seen.total} groups"
    if spared:
        which = f"{seen.total - len(spared)} of {seen.total} groups, all but {quantities.listed(spared)},"
    when = f"at once in {counted(len(steps), 'step')}, first at step {steps[0].step}"
    return _indented(Text(f"{which} {when}{_lost_losses(steps)}."))


def _lost_losses(steps: tuple[Step, ...]) -> str:
    lost = sum(not math.isfinite(step.loss) for step in steps)
    if not lost:
        return ""
    return "; the loss itself is non-finite there" if lost == len(steps) else f"; in {lost} of them the loss is too"


# Batches, parameters and buffers


@dataclass(frozen=True)
class _Sighting:
    """A non-finite tensor: the step in which it was first seen, its counts there, and in how many steps it was."""

    step: int
    counts: TensorCounts
    steps: int


def _sightings(steps: Iterable[Step]) -> list[_Sighting]:
    """Each tensor once, the earliest first."""
    seen: dict[tuple[str, str], _Sighting] = {}
    for step in steps:
        for counts in step.nonfinite:
            known = seen.get((counts.kind, counts.name), _Sighting(step.step, counts, 0))
            seen[counts.kind, counts.name] = replace(known, steps=known.steps + 1)
    return list(seen.values())


def _tensors(sightings: list[_Sighting]) -> RenderableType:
    table = _table("tensor", "steps", "first", "inf", "NaN", "of", "at")
    for sighting in sightings[:MAX_TENSORS]:
        counts = sighting.counts
        numbers = (counts.inf, counts.nan, counts.size)
        first = f"{counts.when} {sighting.step}"
        table.add_row(
            f"{counts.kind} {counts.name}".rstrip(), str(sighting.steps), first, *map(str, numbers), _position(counts)
        )
    parts: list[RenderableType] = [_title("Non-finite tensors, before or after a step"), _indented(table)]
    if len(sightings) > MAX_TENSORS:
        parts.append(_indented(Text(f"… and {len(sightings) - MAX_TENSORS} more (all in the record)", style="dim")))
    return Group(*parts)


def _position(counts: TensorCounts) -> str:
    if not counts.first_index:
        return ""
    index = f"[{', '.join(map(str, counts.first_index))}]"
    return f"sample {counts.first_index[0]}, {index}" if counts.kind == "batch" else index


# Summary and what to do next


def _summary(record: Record, config: str, record_path: str) -> Iterator[RenderableType]:
    yield Text(" · ".join(_facts(record)), style="dim")
    yield Text(" · ".join(_environment(record)), style="dim")
    for note in (*record.environment.notes, *record.unseen.notes):
        yield Text(f"Note: {note}", style="dim")
    if record_path:
        yield _verbatim(f"Record: {record_path}", "dim")
    step = next_step(record, config, record_path)
    if step is not None:
        yield Text.assemble(("Next: ", "bold"), step.why)
        yield _indented(_verbatim(step.command, "bold cyan"))


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


def _environment(record: Record) -> Iterator[str]:
    environment = record.environment
    yield f"torch {environment.torch}"
    yield f"{environment.device} ({environment.device_name})" if environment.device_name else environment.device
    emulated = ", emulated" if environment.emulated else ""
    yield f"{environment.policy} autocast policy{emulated}"


# Layout


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _indented(item: RenderableType, by: int = INDENT) -> Padding:
    return Padding(item, (0, 0, 0, by), expand=False)


def _verbatim(text: str, style: str) -> Text:
    """A line that is never wrapped or cut: a chart row, or a command to copy."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def _table(first: str, *others: str) -> Table:
    """A table without lines: names to the left and folded where too long, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name == "at" else "right", no_wrap=True)
    return table
