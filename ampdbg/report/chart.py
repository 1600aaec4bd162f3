"""The loss scale over the steps as a small chart: log2 scale upwards, skipped steps and non-finite losses marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ampdbg.record.run import Step

from . import quantities

MAX_ROWS = 8
MAX_STRETCH = 3
MARGIN = 2
STEP_AXIS = "step"

# Float32, in which the scaler keeps its scale, ends here; a scale of 0 is drawn at the bottom.
LOWEST_LEVEL, HIGHEST_LEVEL = -150, 128


Kind = Literal["scale", "axis", "skipped", "nonfinite"]


@dataclass(frozen=True)
class Line:
    """One line of the chart and what it shows, by which the report colours it."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Mark:
    """Something that is marked under the axis, at the steps to which it applies."""

    kind: Kind
    name: str
    glyph: str
    applies: Callable[[Step], bool]


@dataclass(frozen=True)
class Column:
    """What one column of the chart stands for: one step, or several consecutive ones; levels are log2."""

    low: int
    high: int
    marks: frozenset[Kind]


MARKS = (
    Mark("skipped", "skipped", "×", lambda step: step.skipped),
    Mark("nonfinite", "loss inf/NaN", "!", lambda step: not math.isfinite(step.loss)),
)


def scale_chart(steps: Sequence[Step], width: int) -> list[Line]:
    """Draws ``steps`` (at least one) within ``width`` characters; long runs share columns, short ones are stretched."""
    rows = _rows(steps)
    labels = [quantities.scale(math.ldexp(1.0, top)) for top, _ in rows]
    marks = [mark for mark in MARKS if any(mark.applies(step) for step in steps)]
    gutter = MARGIN + max(len(text) for text in [*labels, *(mark.name for mark in marks), STEP_AXIS])
    room = max(8, width - gutter - 2)
    columns = _columns(steps, room)
    stretch = max(1, min(MAX_STRETCH, room // len(columns)))
    return [
        *(
            Line(
                "scale", f"{label:>{gutter}} ┤" + "".join(_cell(column, *row) * stretch for column in columns).rstrip()
            )
            for label, row in zip(labels, rows, strict=True)
        ),
        Line("axis", " " * gutter + " └" + "─" * (len(columns) * stretch)),
        *(Line(mark.kind, f"{mark.name:>{gutter}}  " + _mark_row(columns, mark, stretch)) for mark in marks),
        Line("axis", f"{STEP_AXIS:>{gutter}}  " + _ticks(steps, len(columns) * stretch)),
    ]


def _level(scale: float) -> int:
    """log2 of the scale, rounded, within float32's range."""
    if math.isnan(scale) or scale <= 0.0:
        return LOWEST_LEVEL
    if math.isinf(scale):
        return HIGHEST_LEVEL
    return min(HIGHEST_LEVEL, max(LOWEST_LEVEL, round(math.log2(scale))))


def _rows(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """The (highest, lowest) level of each row, top row first: at most ``MAX_ROWS`` of equal height."""
    levels = [_level(step.scale) for step in steps]
    top, bottom = max(levels), min(levels)
    height = math.ceil((top - bottom + 1) / MAX_ROWS)
    return [(level, level - height + 1) for level in range(top, bottom - 1, -height)]


def _columns(steps: Sequence[Step], room: int) -> list[Column]:
    size = math.ceil(len(steps) / room)
    return [_column(steps[start : start + size]) for start in range(0, len(steps), size)]


def _column(steps: Sequence[Step]) -> Column:
    levels = [_level(step.scale) for step in steps]
    return Column(
        low=min(levels),
        high=max(levels),
        marks=frozenset(mark.kind for mark in MARKS if any(mark.applies(step) for step in steps)),
    )


def _cell(column: Column, top: int, bottom: int) -> str:
    if column.low > top or column.high < bottom:
        return " "
    return "━" if bottom <= column.low and column.high <= top else "┃"


def _mark_row(columns: Sequence[Column], mark: Mark, stretch: int) -> str:
    return "".join((mark.glyph if mark.kind in column.marks else " ").ljust(stretch) for column in columns).rstrip()


def _ticks(steps: Sequence[Step], width: int) -> str:
    """The first, middle and last step under the axis, as far as they fit."""
    first, middle, last = str(steps[0].step), str(steps[len(steps) // 2].step), str(steps[-1].step)
    if len(steps) == 1 or width < len(first) + len(last) + 1:
        return first
    line = first + last.rjust(width - len(first))
    start = width // 2
    if line[start - 1 : start + len(middle) + 1].strip() or len(steps) < 5:
        return line
    return line[:start] + middle + line[start + len(middle) :]
