"""Where the values of a site lie against what FP16 can hold, as a bar of fixed width."""

from __future__ import annotations

import math

from ampdbg.formats import FLOAT16

LOWEST = FLOAT16.min_exponent - FLOAT16.precision + 1
"""The exponent of the smallest subnormal; values below it are lost."""

PER_CELL = 4
"""So many exponents share a character."""

LEVELS = "▁▂▃▄▅▆▇█"
DECADES = 6.0
"""The lowest level stands for a millionth of the values, and for all that is less."""

WIDTH = 2 + 2 + (FLOAT16.max_exponent - LOWEST + 1) // PER_CELL


def exponent_bar(lowest: int, counts: tuple[int, ...]) -> str:
    """``lost│subnormal … largest│overflow``: higher is more values, by orders of magnitude.

    Args:
        lowest: the exponent of the first count.
        counts: how many values have each exponent.
    """
    cells = [0] * (WIDTH - 2)
    for exponent, count in enumerate(counts, start=lowest):
        cells[_cell(exponent, len(cells) - 1)] += count
    drawn = [_level(count, sum(counts)) for count in cells]
    return f"{drawn[0]}│{''.join(drawn[1:-1])}│{drawn[-1]}"


def _cell(exponent: int, last: int) -> int:
    return min(max(0, (exponent - LOWEST) // PER_CELL + 1), last)


def _level(count: int, total: int) -> str:
    if count == 0:
        return " "
    height = 1.0 + math.log10(count / total) / DECADES
    return LEVELS[max(0, math.ceil(height * len(LEVELS)) - 1)]
