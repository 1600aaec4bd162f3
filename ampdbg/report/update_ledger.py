"""What half weights, averages in half, and sums of gradients in half lose: a table, whose shares are drawn as bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Literal

from ampdbg.quantities import counted, number, percent, share
from ampdbg.record.run import Updates

from . import view

COLUMNS: Mapping[str, tuple[str, Literal["share", "number"], Callable[[float], str]]] = {
    "lost": ("lost", "share", share),
    "lost_gradient": ("of gradient", "share", share),
    "lost_decay": ("of decay", "share", share),
    "of_average": ("of average", "share", share),
    "unmoved": ("still a step", "share", share),
    "freezes_below": ("still below lr", "number", number),
}
"""What is shown of a kind of weights, by the fields of :class:`KindUpdates`, and of the averages of it."""

SUM = "The sum of the gradients of {} in half is {} from what it is in float32."


def ledger(updates: Updates | None) -> view.Table:
    """A row for each kind of parameter, none where none was measured; columns are left out in which nothing stands."""
    updates = updates or Updates(0)
    averages: dict[str, list[float]] = {}
    for one in updates.averages:
        averages.setdefault(one.kind, []).append(one.lost)
    rows: dict[str, dict[str, Any]] = {one.kind: vars(one) for one in updates.kinds}
    for kind, lost in averages.items():
        rows[kind] = {**rows.get(kind, {}), "of_average": fmean(lost)}
    columns: list[tuple[view.Column, tuple[str, ...]]] = [(view.Column("kind"), tuple(rows))]
    for field, (head, kind, words) in COLUMNS.items():
        values = [row.get(field) for row in rows.values()]
        if any(value is not None for value in values):
            cells = tuple("" if value is None else words(value) for value in values)
            columns.append((view.Column(head, kind), cells))
    heads, cells_of = zip(*columns, strict=True)
    title = f"Half weights, in {counted(updates.steps, 'sampled step')}" if updates.kinds else "Averages in half"
    off, passes = updates.lost_accumulation, counted(updates.passes, "backward pass")
    below = () if off is None else (view.line(SUM.format(passes, percent(off))),)
    return view.Table(title, heads, tuple(zip(*cells_of, strict=True)), below=below)
