"""What a range profile proposes: warnings, since only a replay in FP16 confirms an overflow; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ampdbg.diagnosis.forward import autocast_errors
from ampdbg.diagnosis.windows import window
from ampdbg.formats import FLOAT16
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Site

REMEDIES = {
    "forward-overflow": "run it in FP32 with its inputs cast up, or scale them down before it",
    "gradient-overflow": "run it in FP32, or take a mean where there is a sum",
    "no-usable-scale": "run it in FP32, or split the losses",
}


def diagnose_ranges(record: Record) -> Record:
    """The record of ``ampdbg ranges`` with its findings: overflows first, in order of execution.

    The verdict is ``inconclusive`` where something is beyond a limit and ``healthy`` where nothing is.
    """
    findings = (*autocast_errors(record), *_overflows(record), *_no_scale(record))
    return replace(record, findings=findings, verdict="inconclusive" if findings else "healthy")


def _overflows(record: Record) -> Iterator[Finding]:
    """Each place where an overflow starts; what carries it on follows from it."""
    for site in record.sites:
        if site.phase == "forward" and site.overflow == "starts":
            yield _proposed(record, site, "forward-overflow", f"{_reach(site)} and FP16 ends at {FLOAT16.largest:.0f}")
        elif site.scale_ceiling is not None and site.scale_ceiling < 1.0 and site.overflow != "carried":
            why = f"{_reach(site)} at a loss scale of 1, so that no scale of 1 or more is left"
            yield _proposed(record, site, "gradient-overflow", why)


def _no_scale(record: Record) -> Iterator[Finding]:
    whole = window(record.sites)
    low, high = whole.lowest_ceiling, whole.highest_floor
    if whole.is_open or low is None or high is None or whole.ceiling < 1.0:
        return
    why = (
        f"overflows above a loss scale of {whole.ceiling:g}, and {high.module or 'the root module'} ({high.op}) "
        f"loses more than 1 % of its gradient's energy below {whole.floor:g}: their windows do not meet"
    )
    yield _proposed(record, low, "no-usable-scale", why)


def _reach(site: Site) -> str:
    return f"values reach {site.abs_max:.4g}"


def _proposed(record: Record, site: Site, code: str, message: str) -> Finding:
    return Finding(
        code=code,
        severity="warning",
        step=max(record.planned_steps - 1, 0),
        phase=site.phase,
        message=message,
        remedy=REMEDIES[code],
        module=site.module,
        op=site.op,
        source=site.source,
        evidence={
            "abs_max": site.abs_max,
            "headroom_bits": site.headroom_bits,
            "scale_ceiling": site.scale_ceiling,
            "call": site.call,
        },
    )
