"""How numbers are written in a report: losses, loss scales, shares, counts and durations."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """Four significant digits; ``inf``, ``-inf`` and ``NaN`` by name, ``-`` for what was not measured."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"


def scale(value: float) -> str:
    """A loss scale: whole numbers as they are, large and small powers of two as ``2^k``."""
    if not math.isfinite(value) or value <= 0.0:
        return number(value)
    if value.is_integer() and value < 10_000_000:
        return f"{value:.0f}"
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 0.1 < value < 1.0 else number(value)


def share(part: int, whole: int) -> str:
    """A percentage that never rounds something to nothing, nor a part to the whole; ``-`` of nothing."""
    if whole == 0:
        return "-"
    if part >= whole:
        return "100%"
    percent = 100.0 * part / whole
    if percent < 0.1:
        return "<0.1%"
    return f"{min(percent, 99.9):.1f}%"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def listed(names: tuple[str, ...], limit: int = 4) -> str:
    """``a, b and c``; beyond ``limit`` names the rest is counted."""
    if len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
