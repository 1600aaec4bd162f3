"""Format numbers, names, values and the paths of keys for messages and reports."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal

WRITTEN_OUT = 10_000_000
"""Numbers of at least this size are written with an exponent."""


def number(value: float | None) -> str:
    """Format a number with four digits, or whole: ``65,504``, ``183,300``, ``2.31``, ``1.2e9``; ``-`` for None."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    size = abs(value)
    if not 1000 <= size < WRITTEN_OUT:
        digits, _, exponent = f"{value:.4g}".partition("e")
        return f"{digits}e{int(exponent)}" if exponent else digits
    return f"{value:,.0f}" if value == round(value) else f"{float(f'{value:.4g}'):,.0f}"


def scale(value: float) -> str:
    """Format a loss scale: whole numbers unchanged, large and small powers of two as ``2^k``."""
    if not math.isfinite(value) or value <= 0.0:
        return number(value)
    mantissa, exponent = math.frexp(value)
    is_short = (value.is_integer() and value < WRITTEN_OUT) or 0.1 < value < 1.0
    return number(value) if is_short or mantissa != 0.5 else f"2^{exponent - 1}"


def share(part: float, whole: float = 1.0) -> str:
    """Format a percentage, never rounded to 0% or 100%; ``-`` if the whole is zero or the part is not finite."""
    if whole == 0 or not math.isfinite(part):
        return "-"
    if part == 0 or part == whole:
        return f"{part / whole:.0%}"
    percent = 100.0 * (part / whole)
    if abs(percent) < 0.1:
        return "<0.1%"
    return f"{min(percent, 99.9) if part < whole else percent:.1f}%"


def multiple(part: float, whole: float) -> str:
    """Format a ratio as ``12.5% of``, or as ``2.1 times`` if the part is more than the whole."""
    return f"{share(part, whole)} of" if part <= whole else f"{number(float(f'{part / whole:.2g}'))} times"


def percent(part: float) -> str:
    """Format a percentage with two digits, however small it is; ``-`` if it is not finite."""
    return f"{number(float(f'{100 * part:.2g}'))}%" if math.isfinite(part) else "-"


def module_name(name: str, root: str = "the root module") -> str:
    """Return how a sentence names a module: ``blocks.2.attn``, ``module 2``, and ``root`` for the empty name."""
    return f"module {name}" if re.fullmatch(r"[\d.]+", name) else name or root


def in_module(name: str) -> str:
    """Return how a sentence places something in a module: `` in blocks.2.attn``; "" for the root."""
    return f" in {module_name(name)}" * bool(name)


def counted(count: int, noun: str) -> str:
    """Format a count and its noun: ``1 step``, ``2,000 steps``, ``3 batches``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def listed(names: Iterable[str], most: int = 4) -> str:
    """Join names as ``a, b and c``; beyond ``most`` names, count the rest."""
    names = list(names)
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def dotted(path: Iterable[object]) -> str:
    """Join the path of a key: ``("precision", "pins", 0)`` is ``precision.pins[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def shown(value: object, most: int = 60) -> str:
    """Format a value as JSON and YAML write it, cut to ``most`` characters."""
    try:
        text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # YAML has dates and sets, also as keys
        text = str(value)
    return cut(text, most)


def cut(text: str, most: int) -> str:
    """Cut a text to at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def duration(seconds: float | None) -> str:
    """Format a duration: ``31 ms``, ``1.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def byte_size(count: int) -> str:
    """Format a size in decimal units: ``512 B``, ``1.2 MB``."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 10 else f"{size:.1f} {units[0]}"


UNITS = {f"{unit}{i}": (1024 if i else 1000) ** power for power, unit in enumerate("kMGT", 1) for i in ("", "i")}


def byte_count(text: str) -> int:
    """Return the number of bytes in ``16GiB``, ``800 MB`` or ``1.5G``.

    Raises:
        ValueError: the text is not a size; the message names what is allowed.
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([kMGT]i?)B?", text.strip().replace("K", "k"))
    if found is None:
        raise ValueError(f"got {text!r}; allowed: a number and its unit, such as 16GiB or 800MB")
    return int(Decimal(found[1]) * UNITS[found[2]])


def quoted(text: str, most: int = 80) -> str:
    """Return a text in quotation marks, cut to ``most`` characters."""
    return repr(cut(text, most))
