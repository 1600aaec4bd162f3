"""Batches, parameters and buffers with inf or NaN as a table: where, since when, which sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from ampdbg.record.run import Step, TensorCounts

from .layout import indented, table, title

MAX_TENSORS = 8


@dataclass(frozen=True)
class Sighting:
    """A non-finite tensor: the step in which it was first seen, its counts there, and in how many steps it was."""

    step: int
    counts: TensorCounts
    steps: int


def sightings(steps: Iterable[Step]) -> list[Sighting]:
    """Each tensor once, the earliest first."""
    seen: dict[tuple[str, str], Sighting] = {}
    for step in steps:
        for counts in step.nonfinite:
            known = seen.get((counts.kind, counts.name), Sighting(step.step, counts, 0))
            seen[counts.kind, counts.name] = replace(known, steps=known.steps + 1)
    return list(seen.values())


def tensors_text(seen: list[Sighting]) -> RenderableType:
    """A table of ``seen``, at least one."""
    rows = table("tensor", "steps", "first", "inf", "NaN", "of", "at")
    for sighting in seen[:MAX_TENSORS]:
        counts = sighting.counts
        numbers = (counts.inf, counts.nan, counts.size)
        first = f"{counts.when} {sighting.step}"
        rows.add_row(
            f"{counts.kind} {counts.name}".rstrip(), str(sighting.steps), first, *map(str, numbers), _position(counts)
        )
    parts: list[RenderableType] = [title("Non-finite tensors, before or after a step"), indented(rows)]
    if len(seen) > MAX_TENSORS:
        parts.append(indented(Text(f"… and {len(seen) - MAX_TENSORS} more (all in the record)", style="dim")))
    return Group(*parts)


def _position(counts: TensorCounts) -> str:
    if not counts.first_index:
        return ""
    index = f"[{', '.join(map(str, counts.first_index))}]"
    return f"sample {counts.first_index[0]}, {index}" if counts.kind == "batch" else index
