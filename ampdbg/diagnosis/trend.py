"""Findings about values that approach FP16's limit, and about a loss scale that falls towards 1.

An activation within one bit of the limit is always reported. Growing values are extrapolated only if they grew by the
same factor all the time. Their logarithm is then on a line. The line ends at a few times the observed steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from ampdbg.formats import FLOAT16
from ampdbg.quantities import number, share
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding, Severity
from ampdbg.record.run import Record, Trend

AHEAD = "limit-ahead"

FEWEST_SAMPLES = 8
"""Fewer samples are not extrapolated."""

NEAR_LIMIT = FLOAT16.largest / 2
"""Values from here on are within one bit of the limit."""

SAME, APART = 1.05, 16.0
"""Values within the first factor count as one value. If the rest are below it by the second factor, the values did
not grow to it."""

LEAST_GROWTH = 1.0
"""In bits. A smaller growth over all samples may be noise."""

MOST_SCATTER = 0.15
"""Largest root mean square distance of the samples from the line, as a share of the growth."""

LEAST_SHARE = 0.2
"""Each third of the samples must contribute this share of the growth. A series that levels off or jumps does not."""

LEAST_LASTING = 0.75
"""The later half must have this share of the slope. In bits, growth by a constant slows down."""

NEAR, FAR = 1.0, 4.0
"""Limits in multiples of the observed steps: a forecast up to the first is a warning, up to the second information."""


def ahead(record: Record) -> Iterator[Finding]:
    """Yield ``limit-ahead`` for the value nearest to the limit, or else for the value that would reach it first."""
    near = [trend for trend in record.trends if is_near(trend)]
    reached = [(at, trend) for trend in record.trends if (at := reached_at(trend)) is not None]
    if near:
        yield _near(max(near, key=lambda trend: max(trend.values)))
    elif reached:
        yield _ahead(*min(reached, key=lambda one: one[0]))


def is_near(trend: Trend) -> bool:
    """True if the trend is an activation that was within one bit of the limit, and not a constant."""
    return trend.kind == "activation" and max(trend.values, default=0.0) >= NEAR_LIMIT and not is_constant(trend)


def is_constant(trend: Trend) -> bool:
    """True if the large values are equal, as for a constant or a mask. A mask is not in every batch."""
    large = [value for value in trend.values if 2 * value >= max(trend.values)]
    others = [value for value in trend.values if 2 * value < max(trend.values)]
    return max(large) <= SAME * min(large) and max(others, default=0.0) * APART < min(large)


def what_of(trend: Trend) -> str:
    """Return how messages name an activation: ``mul in body``."""
    return f"{trend.op or 'the output'}{f' in {trend.name}' if trend.name else ''}"


def reached_at(trend: Trend) -> float | None:
    """Return the step at which the trend would reach its limit; None without a trend, or if it is too far away."""
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
    """Return the slope in bits per step if the samples are on a rising line; else None."""
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


def _near(trend: Trend) -> Finding:
    largest = max(trend.values)
    step, part = trend.steps[trend.values.index(largest)], share(largest, FLOAT16.largest)
    began = f"from {number(trend.values[0])} at step {trend.steps[0]:,}"
    message = f"{what_of(trend)} reaches {number(largest)}, {part} of FP16's limit of 65,504, {began}"
    return _finding(trend, step, message, "warning", {"value": largest})


def _ahead(reached: float, trend: Trend) -> Finding:
    first, last = trend.steps[0], trend.steps[-1]
    span = f"from {number(trend.values[0])} to {number(trend.values[-1])} in steps {first:,} to {last:,}"
    near = f"near step {_rounded(reached - last, last):,}"
    messages = {
        "activation": f"{what_of(trend)} grows steadily, {span}, and would reach FP16's limit of 65,504 {near}",
        "gradient": f"the gradient of {trend.name} grows steadily, {span} without the loss scale, and would overflow "
        f"FP16 at any loss scale {near}",
        "scale": f"the loss scale falls steadily, {span}, and would reach 1 {near}",
    }
    severity: Severity = "warning" if reached - last <= NEAR * (last - first) else "info"
    evidence = {"value": trend.values[-1], "reached_at": round(reached)}
    return _finding(trend, last, messages[trend.kind], severity, evidence)


def _finding(trend: Trend, step: int, message: str, severity: Severity, evidence: Mapping[str, object]) -> Finding:
    is_forward = trend.kind == "activation"
    return finding_of(
        AHEAD,
        step,
        "forward" if is_forward else "backward",
        message,
        severity=severity,
        **{"module" if is_forward else "parameter": trend.name},
        op=trend.op,
        source=trend.source,
        evidence={**evidence, "samples": len(trend.steps)},
    )


def _rounded(steps: float, last: int) -> int:
    """Return the step ``steps`` after the last one. The distance is rounded to two digits."""
    unit = int(10.0 ** max(0, math.floor(math.log10(max(steps, 1.0))) - 1))
    return last + round(steps / unit) * unit
