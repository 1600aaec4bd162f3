"""From every op of a shadow step to one site for each line, module and op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ampdbg.formats import Exponents, headroom_bits, scale_ceiling, scale_floor
from ampdbg.probes.magnitudes import Magnitude, together
from ampdbg.probes.shadow_trace import Overflow, RangeSeen
from ampdbg.probes.source_lines import source_of
from ampdbg.record.run import Site


def sites_of(ranges: Iterable[RangeSeen], dtype: str = "float16") -> tuple[Site, ...]:
    """Gathers ops by phase, module, op and source line, in order of first execution.

    Args:
        ranges: the ops of one step.
        dtype: what the real run has where the shadow has bfloat16.
    """
    gathered: dict[Any, list[RangeSeen]] = {}
    for seen in ranges:
        place = seen.place
        gathered.setdefault((place.phase, place.module, seen.op, place.line), []).append(seen)
    return tuple(_site(order, ranges, dtype) for order, ranges in enumerate(gathered.values()))


def _site(order: int, ranges: Sequence[RangeSeen], dtype: str) -> Site:
    place = ranges[0].place
    output = together(seen.output for seen in ranges)
    exponents = sum((seen.exponents for seen in ranges), Exponents())
    is_gradient = place.phase == "backward"
    return Site(
        phase=place.phase,
        module=place.module,
        op=ranges[0].op,
        source=source_of(place.line) if place.line else None,
        dtype=dtype,
        order=order,
        calls=len(ranges),
        call=max(ranges, key=lambda seen: seen.output.largest).place.call,
        size=output.size,
        inf=output.inf,
        nan=output.nan,
        abs_max=output.largest,
        headroom_bits=_rounded(output),
        overflow=_overflow(ranges),
        lowest_exponent=exponents.lowest,
        exponents=exponents.counts,
        scale_ceiling=scale_ceiling(output.largest) if is_gradient else None,
        scale_floor=scale_floor(exponents) if is_gradient else None,
        is_noise=all(seen.is_noise for seen in ranges),
    )


def _rounded(output: Magnitude) -> float:
    # Two decimals tell all there is to a value that was rounded to eight bits.
    return round(headroom_bits(output.largest), 2)


def _overflow(ranges: Sequence[RangeSeen]) -> Overflow:
    kinds = {seen.overflow for seen in ranges}
    return "starts" if "starts" in kinds else "carried" if "carried" in kinds else ""
