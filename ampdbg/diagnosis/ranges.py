"""Findings of a range profile: the loss scales that suit each module and the model, and possible overflows.

A range profile measures every op in bfloat16, which has FP32's range. A site is one op on one line. Findings are
warnings, since only an FP16 replay confirms an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.cause import NO_USABLE_SCALE
from ampdbg.diagnosis.misuse import autocast_errors
from ampdbg.diagnosis.producers import OVERFLOWS, UNKNOWN, limit_of, op_name
from ampdbg.formats import BFLOAT16, FLOAT16
from ampdbg.quantities import counted, module_name, number
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding, Phase
from ampdbg.record.pins import is_pinned
from ampdbg.record.run import Readiness, Record, Replay, Site, Verdict

FIRST_SCALE = 65536.0
"""The initial scale of a GradScaler; higher scales are not tried."""

ROUNDING_BITS = 0.01
"""FP16's lowest number is closer than this to a power of two, in bits."""


@dataclass(frozen=True)
class Window:
    """The usable loss scales from ``floor`` to ``ceiling``, both included. They are powers of two.

    ``lowest_ceiling`` is the first site to overflow above the ceiling. ``highest_floor`` loses more than 1 % of its
    energy below the floor. Each is None if no site sets such a bound.
    """

    module: str
    floor: float
    ceiling: float
    lowest_ceiling: Site | None = None
    highest_floor: Site | None = None

    @property
    def is_open(self) -> bool:
        """True if the window has a scale. Otherwise the two sites cannot share one."""
        return self.floor <= self.ceiling


def module_windows(sites: Iterable[Site]) -> Iterator[Window]:
    """Yield the window of each module with gradients, in order of execution."""
    by_module: dict[str, list[Site]] = {}
    for site in sites:
        if site.scale_ceiling is not None and site.scale_floor is not None:
            by_module.setdefault(site.module, []).append(site)
    yield from (window(members, module) for module, members in by_module.items())


def window(sites: Iterable[Site], module: str = "") -> Window:
    """Return the scales at which all ``sites`` keep their gradients. Without ``module``, they are for the whole
    model."""
    sites = tuple(sites)
    lowest = min((site for site in sites if site.ceiling < math.inf), key=attrgetter("ceiling"), default=None)
    highest = max((site for site in sites if site.floor > 0.0), key=attrgetter("floor"), default=None)
    return Window(
        module=module,
        floor=highest.floor if highest else 0.0,
        ceiling=lowest.ceiling if lowest else math.inf,
        lowest_ceiling=lowest,
        highest_floor=highest,
    )


def measured_step(record: Record) -> int:
    """Return the number of the measured step, which is the last step of the run or of a script's capture."""
    is_captured = record.script is not None and record.steps
    return record.steps[-1].step if is_captured else max(record.planned_steps - 1, 0)


def overflows_at_any_scale(sites: Iterable[Site]) -> bool:
    """True if an overflow of the forward pass starts at one of the sites."""
    return any(site.scale_ceiling is None and site.overflow == "starts" for site in sites)


def is_mask(site: Site) -> bool:
    """True for a mask of FP16's lowest number, which rounds to 65,536 in the bfloat16 measurement."""
    return site.overflow == "carried" and site.headroom_bits >= -ROUNDING_BITS


def unpinned(sites: Iterable[Site], pins: Sequence[str]) -> tuple[Site, ...]:
    """Return the sites that stay in half with the given pins."""
    return tuple(site for site in sites if not is_pinned(site.module, pins))


def in_half(record: Record) -> tuple[Site, ...]:
    """Return the sites that stay in half with the pins of the record's readiness."""
    return unpinned(record.sites, record.readiness.pins if record.readiness else ())


def scale_to_try(sites: Iterable[Site]) -> float:
    """Return a loss scale of at least 1 in the window of all sites. An FP16 run should be finite there, unless an op
    overflows at any scale. The window's end may be one rounding too high."""
    whole = window(sites)
    highest = min(whole.ceiling / 2.0, FIRST_SCALE)
    return max(1.0, highest, whole.floor if whole.is_open else 0.0)


def check_in(record: Record, dtype: str) -> Replay | None:
    """Return the check of a range profile in the given dtype, or None."""
    return next((check for check in record.checks if check.dtype == dtype), None)


def refuted_by(record: Record) -> Replay | None:
    """Return the check in bfloat16, or else FP16, that shows that the measured step is not finite; else None. FP16
    gradients count only if the window extends beyond the scale of the check."""
    wide, half = check_in(record, "bfloat16"), check_in(record, "float16")
    if wide is not None and not is_finite(wide):
        return wide
    if half is None or is_finite(half) or overflows_at_any_scale(record.sites):
        return None
    is_allowed = window(record.sites).ceiling >= 2.0 * half.scale
    return half if is_allowed or not math.isfinite(half.loss) else None


def what_fails(check: Replay) -> str:
    """Return what is not finite in a step, the loss or the gradients, or that the step raised."""
    if check.error:
        return "the step raises an error"
    if not math.isfinite(check.loss):
        return f"the loss is {number(check.loss)}"
    kinds = ((check.nan, "NaN"), (check.inf, "inf"))
    values = " and ".join(f"{count:,} {kind}" for count, kind in kinds if count)
    return f"the gradients hold {values}, in {counted(len(check.gradients), 'parameter')}"


def diagnose_ranges(record: Record) -> Record:
    """Return the record of ``ampdbg ranges`` with its findings.

    A step that is not finite comes first, then overflows in order of execution. The verdict is ``healthy`` if nothing
    exceeds a limit, and ``other`` if the step is not finite in FP32 either. Otherwise it is ``inconclusive``, also if
    not everything was measured.
    """
    record = replace(record, readiness=_readiness(record))
    bad = refuted_by(record)
    findings = [*autocast_errors(record), *([] if bad is None else [_not_finite(record, bad)])]
    is_measured = bad is None or bad.dtype != "bfloat16"
    findings += [each for each in _overflows(record) if is_measured or each.phase == "forward"]
    findings += _no_scale(record) if is_measured else ()
    return replace(record, findings=tuple(findings), verdict=_verdict(record, findings))


def _readiness(record: Record) -> Readiness | None:
    """Return the readiness for FP16; None for a step that does not run in bfloat16 or was not tried in FP16.

    It is undecided if the FP16 step raised, or if only its gradients are infinite. It is also undecided if the
    measurement is incomplete or leaves no loss scale.
    """
    tried = [check for check in record.checks if check.dtype == FLOAT16.name]
    if not tried or all(site.dtype != BFLOAT16.name for site in record.sites):
        return None
    first, last = tried[0], tried[-1]
    is_cured = is_finite(last) and bool(unpinned(record.sites, last.pins))
    pins = last.pins if is_cured else ()
    whole = window(unpinned(record.sites, pins))
    is_decided = whole.is_open if is_cured else not (math.isfinite(first.loss) or first.error)
    made = (site.abs_max for site in record.sites if site.phase == "forward" and site.overflow != "carried")
    return Readiness(
        is_cured if is_decided and not record.unseen.unmeasured else None,
        max(made, default=0.0),
        whole.floor,
        whole.ceiling,
        pins,
    )


def _verdict(record: Record, findings: Sequence[Finding]) -> Verdict:
    if not findings:
        return "inconclusive" if record.error or record.unseen.unmeasured else "healthy"
    return "other" if findings[0].evidence.get("finite_in_fp32") is False else "inconclusive"


def fails_in_fp32(record: Record) -> bool | None:
    """True if a step that is not finite in bfloat16 is not finite in FP32 either; None if unknown."""
    fp32 = check_in(record, "float32")
    return None if fp32 is None or fp32.error else not is_finite(fp32)


def _not_finite(record: Record, bad: Replay) -> Finding:
    is_forward = not math.isfinite(bad.loss)  # as of a step that raised
    phase: Phase = "forward" if is_forward else "backward"
    evidence = {
        "loss": bad.loss,
        "scale": bad.scale,
        "parameters": len(bad.gradients),
        "inf": bad.inf,
        "nan": bad.nan,
    }
    fails = fails_in_fp32(record) if bad.dtype == "bfloat16" else None
    if fails is not None:
        evidence["finite_in_fp32"] = not fails
    return finding_of(
        UNKNOWN,  # a range profile does not search for the cause
        measured_step(record),
        phase,
        _of_half(bad, is_forward) if bad.dtype == "float16" else _of_wide(record, bad),
        severity="warning",
        remedy="replay the step in FP16, FP32 and FP64 to find the op where it starts",
        evidence=evidence,
    )


def _of_half(bad: Replay, is_forward: bool) -> str:
    what = f"in FP16 {what_fails(bad)}"
    if bad.error:
        return f"{what}, and none in bfloat16, in which ampdbg measures: {bad.error}"
    if is_forward:
        return f"{what}, at any loss scale; in bfloat16, in which ampdbg measures, everything is finite"
    return f"{what}, at a loss scale of {number(bad.scale)} that the ranges allow"


def _of_wide(record: Record, bad: Replay) -> str:
    what, fp32 = what_fails(bad), check_in(record, "float32") or bad
    if fails_in_fp32(record):
        return f"{what_fails(fp32)} in FP32 too: precision is not the cause, and no loss scale helps"
    told = f"FP32 shows nothing: {fp32.error}" if fp32.error else "in FP32 everything is finite"
    return f"{what} in bfloat16, in which ampdbg measures; {told}"


def _overflows(record: Record) -> Iterator[Finding]:
    """Yield a finding for each site where an overflow starts, but not for the ops that carry it further."""
    for site in record.sites:
        if overflows_at_any_scale([site]):
            yield _proposed(record, site, OVERFLOWS[site.phase], f"{_reach(site)}, above {limit_of(FLOAT16)}")
        elif site.ceiling < 1.0 and site.overflow != "carried":
            why = f"{_reach(site)} at a loss scale of 1, so no scale of 1 or more is left"
            yield _proposed(record, site, OVERFLOWS["backward"], why)


def _no_scale(record: Record) -> Iterator[Finding]:
    whole = window(in_half(record))
    low, high = whole.lowest_ceiling, whole.highest_floor
    if whole.is_open or low is None or high is None or whole.ceiling < 1.0:
        return
    why = (
        f"{op_name(low.op)} overflows above a loss scale of {number(whole.ceiling)}; {op_name(high.op)} in "
        f"{module_name(high.module)} loses more than 1 % of its gradient's energy below "
        f"{number(whole.floor)}"
    )
    yield _proposed(record, low, NO_USABLE_SCALE, why)


def _reach(site: Site) -> str:
    return f"{op_name(site.op)} reaches {number(site.abs_max)}"


def _proposed(record: Record, site: Site, code: str, message: str) -> Finding:
    return finding_of(
        code,
        measured_step(record),
        site.phase,
        message,
        severity="warning",
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
