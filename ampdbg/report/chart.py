"""What a terminal draws with characters: the loss scale over the steps, and where a site's values lie in FP16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampdbg import quantities
from ampdbg.formats import FLOAT16
from ampdbg.record.run import Step

from .view import Histogram, Tone, Words

MAX_ROWS = 8
MAX_STRETCH = 3
MARGIN = 2
STEP_AXIS = "step"

# Float32, in which the scaler keeps its scale, ends here; a scale of 0 is drawn at the bottom.
LOWEST_LEVEL, HIGHEST_LEVEL = -150, 128

LOWEST = FLOAT16.min_exponent - FLOAT16.precision + 1
"""The exponent of the smallest subnormal; values below it are lost."""

PER_CELL = 4
"""So many exponents share a character."""

LEVELS = "▁▂▃▄▅▆▇█"
DECADES = 6.0
"""The lowest level stands for a millionth of the values, and for all that is less."""

BAR_WIDTH = 2 + 2 + (FLOAT16.max_exponent - LOWEST + 1) // PER_CELL


@dataclass(frozen=True)
class ChartMark:
    """Something that is marked under the axis, at the steps to which it applies."""

    tone: Tone
    name: str
    glyph: str
    applies: Callable[[Step], bool]


@dataclass(frozen=True)
class ChartColumn:
    """What one column of the chart stands for: one step, or several consecutive ones; levels are log2."""

    low: int
    high: int
    marks: frozenset[Tone]


MARKS = (
    ChartMark("doubtful", "skipped", "×", lambda step: step.skipped),
    ChartMark("bad", "loss inf/NaN", "!", lambda step: not math.isfinite(step.loss)),
)


def scale_chart(steps: Sequence[Step], width: int) -> list[Words]:
    """Draws ``steps`` (at least one) within ``width`` characters; long runs share columns, short ones are stretched."""
    rows = _rows(steps)
    labels = [quantities.scale(math.ldexp(1.0, top)) for top, _ in rows]
    marks = [mark for mark in MARKS if any(mark.applies(step) for step in steps)]
    gutter = MARGIN + max(len(text) for text in [*labels, *(mark.name for mark in marks), STEP_AXIS])
    room = max(8, width - gutter - 2)
    columns = _columns(steps, room)
    stretch = max(1, min(MAX_STRETCH, room // len(columns)))
    plot = ("".join(_cell(column, *row) * stretch for column in columns).rstrip() for row in rows)
    return [
        *(Words(f"{label:>{gutter}} ┤{cells}", "chart") for label, cells in zip(labels, plot, strict=True)),
        Words(" " * gutter + " └" + "─" * (len(columns) * stretch), "faint"),
        *(Words(f"{mark.name:>{gutter}}  " + _mark_row(columns, mark, stretch), mark.tone) for mark in marks),
        Words(f"{STEP_AXIS:>{gutter}}  " + _ticks(steps, len(columns) * stretch), "faint"),
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


def _columns(steps: Sequence[Step], room: int) -> list[ChartColumn]:
    size = math.ceil(len(steps) / room)
    return [_column(steps[start : start + size]) for start in range(0, len(steps), size)]


def _column(steps: Sequence[Step]) -> ChartColumn:
    levels = [_level(step.scale) for step in steps]
    return ChartColumn(
        low=min(levels),
        high=max(levels),
        marks=frozenset(mark.tone for mark in MARKS if any(mark.applies(step) for step in steps)),
    )


def _cell(column: ChartColumn, top: int, bottom: int) -> str:
    if column.low > top or column.high < bottom:
        return " "
    return "━" if bottom <= column.low and column.high <= top else "┃"


def _mark_row(columns: Sequence[ChartColumn], mark: ChartMark, stretch: int) -> str:
    return "".join((mark.glyph if mark.tone in column.marks else " ").ljust(stretch) for column in columns).rstrip()


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


def exponent_bar(histogram: Histogram) -> str:
    """``lost│subnormal … largest│overflow``: higher is more values, by orders of magnitude."""
    counts = histogram.counts
    cells = [0] * (BAR_WIDTH - 2)
    for exponent, count in enumerate(counts, start=histogram.lowest):
        cells[_place(exponent, len(cells) - 1)] += count
    drawn = [_height(count, sum(counts)) for count in cells]
    return f"{drawn[0]}│{''.join(drawn[1:-1])}│{drawn[-1]}"


def _place(exponent: int, last: int) -> int:
    return min(max(0, (exponent - LOWEST) // PER_CELL + 1), last)


def _height(count: int, total: int) -> str:
    if count == 0:
        return " "
    height = 1.0 + math.log10(count / total) / DECADES
    return LEVELS[max(0, math.ceil(height * len(LEVELS)) - 1)]
