"""What grows towards FP16's limit, and when it would be there; a loss scale that falls towards 1.

A series is believed only where it has grown by the same factor all along: then the logarithm lies on a line, and the
line may be drawn on, though no further than a few times what was seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from ampdbg.formats import FLOAT16
from ampdbg.quantities import number
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Trend

AHEAD = "limit-ahead"

FEWEST_SAMPLES = 8
"""Fewer are no trend."""

LEAST_GROWTH = 1.0
"""Bits: what has not doubled in all that was seen may be noise."""

MOST_SCATTER = 0.15
"""The samples lie so near to the line, root mean square, as a share of what it has grown."""

LEAST_SHARE = 0.2
"""Each third of the samples has grown by at least so much of the whole: what levels off does not, nor what leaps."""

LEAST_LASTING = 0.75
"""The later half rises at least so fast, as a share of all: what grows by a constant is ever slower in bits."""

NEAR, FAR = 1.0, 4.0
"""What is reached within so many times the steps that were seen is a warning; information up to the other."""


def ahead(record: Record) -> Iterator[Finding]:
    """``limit-ahead`` for what would reach its limit first; the record has the others."""
    reached = [(at, trend) for trend in record.trends if (at := reached_at(trend)) is not None]
    if reached:
        yield _finding(*min(reached, key=lambda one: one[0]))


def reached_at(trend: Trend) -> float | None:
    """The step at which the trend would reach its limit; None where it is none, or too far away to be told."""
    towards = -1.0 if trend.kind == "scale" else 1.0
    limit = 0.0 if trend.kind == "scale" else math.log2(FLOAT16.largest)
    steps, bits = list(map(float, trend.steps)), [towards * math.log2(value) for value in trend.values]
    slope = _slope(steps, bits)
    if slope is None:
        return None
    left = towards * limit - bits[-1]
    at = steps[-1] + max(left, 0.0) / slope
    return at if at - steps[-1] <= FAR * (steps[-1] - steps[0]) else None


def _slope(steps: Sequence[float], bits: Sequence[float]) -> float | None:
    """Bits a step, where the samples lie on a line that rises; else None."""
    if len(steps) < FEWEST_SAMPLES:
        return None
    slope, start = statistics.linear_regression(steps, bits)
    growth = slope * (steps[-1] - steps[0])
    off = [bit - start - slope * step for step, bit in zip(steps, bits, strict=True)]
    half, third = len(bits) // 2, len(bits) // 3
    low, mid, high = map(statistics.median, (bits[:third], bits[third : len(bits) - third], bits[len(bits) - third :]))
    is_steady = min(mid - low, high - mid) >= LEAST_SHARE * growth
    is_lasting = statistics.linear_regression(steps[half:], bits[half:]).slope >= LEAST_LASTING * slope
    is_near = math.sqrt(statistics.fmean(one * one for one in off)) <= MOST_SCATTER * growth
    return slope if growth >= LEAST_GROWTH and is_steady and is_lasting and is_near else None


def _finding(reached: float, trend: Trend) -> Finding:
    first, last = trend.steps[0], trend.steps[-1]
    span = f"from {number(trend.values[0])} to {number(trend.values[-1])} in steps {first:,} to {last:,}"
    near = f"near step {_rounded(reached - last, last):,}"
    where = f" in {trend.name}" if trend.name else ""
    told = {
        "activation": f"the output{where} grows steadily, {span}, and would reach FP16's limit of 65,504 {near}",
        "gradient": f"the gradient of {trend.name} grows steadily, {span} without the loss scale, and would overflow "
        f"FP16 at any loss scale {near}",
        "scale": f"the loss scale falls steadily, {span}, and would be at 1 {near}",
    }
    return finding_of(
        AHEAD,
        last,
        "forward" if trend.kind == "activation" else "backward",
        told[trend.kind],
        severity="warning" if reached - last <= NEAR * (last - first) else "info",
        module=trend.name if trend.kind == "activation" else "",
        parameter=trend.name if trend.kind == "gradient" else "",
        evidence={"value": trend.values[-1], "reached_at": round(reached), "samples": len(trend.steps)},
    )


def _rounded(steps: float, last: int) -> int:
    """The step that lies so far behind the last one, to two figures of the distance."""
    unit = int(10.0 ** max(0, math.floor(math.log10(max(steps, 1.0))) - 1))
    return last + round(steps / unit) * unit
