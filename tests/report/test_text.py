"""The parts of a page in a terminal: the chart of loss scales, bars of exponents, and blocks of Markdown."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdbg.formats import Exponents
from ampdbg.record.run import Step
from ampdbg.report.formats.text import BAR_WIDTH, MAX_ROWS, blocks, exponent_bar, scale_chart
from tests.report.records import healthy_step

scales = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-149, 127).map(lambda power: 2.0**power)


def at(*values: float) -> list[Step]:
    return [healthy_step(number, scale) for number, scale in enumerate(values)]


def drawn(steps: Sequence[Step], width: int = 80) -> list[str]:
    return [line.text for line in scale_chart(steps, width)]


def test_a_falling_scale_is_drawn_as_a_staircase() -> None:
    assert drawn(at(8, 8, 4, 2)) == [
        "     8 ┤━━━━━━",
        "     4 ┤      ━━━",
        "     2 ┤         ━━━",
        "       └────────────",
        "  step  0          3",
    ]


def test_skipped_steps_and_nonfinite_losses_are_marked_below_the_chart() -> None:
    steps = at(8, 8, 4, 4)
    steps[1] = replace(steps[1], skipped=True)
    steps[2] = replace(steps[2], loss=math.nan)
    steps[3] = replace(steps[3], loss=-math.inf)
    marks = [line.text for line in scale_chart(steps, 80) if line.tone in ("doubtful", "bad")]
    assert marks == ["       skipped     ×", "  loss inf/NaN        !  !"]


def test_rows_between_two_scales_are_blank() -> None:
    assert drawn(at(8, 2))[:3] == ["     8 ┤━━━", "     4 ┤", "     2 ┤   ━━━"]


def test_a_wide_range_of_scales_shares_rows() -> None:
    lines = drawn(at(*(2.0**power for power in range(16, -16, -1))))
    assert [line.split("┤")[0].strip() for line in lines[:MAX_ROWS]] == [
        *("65,536", "4,096", "256", "16", "1", "2^-4", "2^-8", "2^-12")
    ]


def test_a_scale_change_within_a_column_is_drawn_through_its_rows() -> None:
    top, bottom = drawn(at(*[8.0] * 14, *[4.0] * 16), width=18)[:2]
    assert top.count("┃") == bottom.count("┃") == 1


def test_a_scale_of_zero_is_drawn_at_the_bottom() -> None:
    lines = scale_chart(at(1.0, 0.0), 80)
    plot = [line.text for line in lines if line.tone == "chart"]
    assert plot[0].endswith("┤━━━")
    assert plot[-1].endswith("┤   ━━━")


@given(st.lists(st.tuples(scales, st.booleans(), st.floats()), min_size=1, max_size=300), st.integers(40, 160))
def test_the_chart_fits_the_width_and_draws_every_column(values: list[tuple[float, bool, float]], width: int) -> None:
    steps = [
        replace(healthy_step(number, scale), skipped=skipped, loss=loss)
        for number, (scale, skipped, loss) in enumerate(values)
    ]
    lines = scale_chart(steps, width)
    plot = [line.text.partition("┤")[2] for line in lines if line.tone == "chart"]
    columns = max(map(len, plot))
    assert max(len(line.text) for line in lines) <= width
    assert len(plot) <= MAX_ROWS
    assert all(any(len(row) > column and row[column] != " " for row in plot) for column in range(columns))
    marks = sum(line.text.count("×") for line in lines)
    assert any(step.skipped for step in steps) <= marks <= sum(step.skipped for step in steps)


BARS = {
    "lost": ((-30, (1,)), "█│          │ "),
    "the smallest subnormal": ((-24, (1,)), " │█         │ "),
    "the largest": ((15, (1,)), " │         █│ "),
    "overflow": ((16, (1,)), " │          │█"),
    "a millionth": ((0, (1, 0, 0, 0, 1_000_000)), " │      ▁█  │ "),
    "a thousandth": ((0, (1, 0, 0, 0, 1000)), " │      ▄█  │ "),
    "nothing": ((0, ()), " │          │ "),
}


@pytest.mark.parametrize(("histogram", "bar"), BARS.values(), ids=BARS)
def test_the_exponent_bar_shows_the_spread_of_the_values(histogram: tuple[int, tuple[int, ...]], bar: str) -> None:
    assert exponent_bar(Exponents(*histogram)) == bar
    assert len(bar) == BAR_WIDTH


def test_markdown_blocks_are_paragraphs_items_and_code() -> None:
    text = "One\nparagraph.\n\n- first\n  item\n- second\n\n```python\nif x:\n\n    y()\n```\n\nA list:\n- b - c"
    assert list(blocks(text)) == [
        ("paragraph", "One paragraph."),
        ("item", "first item"),
        ("item", "second"),
        ("code", "if x:\n\n    y()"),
        ("paragraph", "A list:"),
        ("item", "b - c"),
    ]
