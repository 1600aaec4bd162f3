"""What a range profile shows: which loss scales suit each module and the whole model, and what may overflow.

Its findings are warnings, since only a replay in FP16 confirms an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ampdbg.diagnosis.misuse import autocast_errors
from ampdbg.diagnosis.producers import OVERFLOWS, limit_of, op_name
from ampdbg.diagnosis.scale import NO_USABLE_SCALE
from ampdbg.formats import FLOAT16
from ampdbg.quantities import number
from ampdbg.record.codes import finding_of
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Site


@dataclass(frozen=True)
class Window:
    """The loss scales from ``floor`` to ``ceiling``, both of which still work; powers of two.

    ``lowest_ceiling`` and ``highest_floor`` are the sites that bound it: above the ceiling the first
    overflows, below the floor the second loses more than 1 % of its energy. None where nothing does.
    """

    module: str
    floor: float
    ceiling: float
    lowest_ceiling: Site | None = None
    highest_floor: Site | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a scale in it; where there is none, the two sites cannot share one."""
        return self.floor <= self.ceiling


def module_windows(sites: Iterable[Site]) -> Iterator[Window]:
    """The window of each module that has gradients, in order of execution."""
    by_module: dict[str, list[Site]] = {}
    for site in sites:
        if site.scale_ceiling is not None and site.scale_floor is not None:
            by_module.setdefault(site.module, []).append(site)
    yield from (window(members, module) for module, members in by_module.items())


def window(sites: Iterable[Site], module: str = "") -> Window:
    """The scales at which every one of ``sites`` keeps its gradients: by default, read as the whole model's.

    Gradients that are nothing but rounding error may be lost without harm and raise no floor.
    """
    sites = tuple(sites)
    lowest = min((site for site in sites if math.isfinite(_ceiling(site))), key=_ceiling, default=None)
    losing = (site for site in sites if _floor(site) > 0.0 and not site.is_noise)
    highest = max(losing, key=_floor, default=None)
    return Window(
        module=module,
        floor=_floor(highest) if highest else 0.0,
        ceiling=_ceiling(lowest) if lowest else math.inf,
        lowest_ceiling=lowest,
        highest_floor=highest,
    )


def diagnose_ranges(record: Record) -> Record:
    """The record of ``ampdbg ranges`` with its findings: overflows first, in order of execution.

    The verdict is ``healthy`` where nothing is beyond a limit, else ``inconclusive``: also where nothing was measured.
    """
    findings = (*autocast_errors(record), *_overflows(record), *_no_scale(record))
    return replace(record, findings=findings, verdict="inconclusive" if findings or record.error else "healthy")


def _overflows(record: Record) -> Iterator[Finding]:
    """Each place where an overflow starts; what carries it on follows from it."""
    for site in record.sites:
        if site.phase == "forward" and site.overflow == "starts":
            yield _proposed(record, site, OVERFLOWS["forward"], f"{_reach(site)}, above {limit_of(FLOAT16)}")
        elif site.scale_ceiling is not None and site.scale_ceiling < 1.0 and site.overflow != "carried":
            why = f"{_reach(site)} at a loss scale of 1, so no scale of 1 or more is left"
            yield _proposed(record, site, OVERFLOWS["backward"], why)


def _no_scale(record: Record) -> Iterator[Finding]:
    whole = window(record.sites)
    low, high = whole.lowest_ceiling, whole.highest_floor
    if whole.is_open or low is None or high is None or whole.ceiling < 1.0:
        return
    why = (
        f"{op_name(low.op)} overflows above a loss scale of {number(whole.ceiling)}, and {op_name(high.op)} in "
        f"{high.module or 'the root module'} loses more than 1 % of its gradient's energy below {number(whole.floor)}"
    )
    yield _proposed(record, low, NO_USABLE_SCALE, why)


def _reach(site: Site) -> str:
    return f"{op_name(site.op)} reaches {number(site.abs_max)}"


def _proposed(record: Record, site: Site, code: str, message: str) -> Finding:
    return finding_of(
        code,
        max(record.planned_steps - 1, 0),
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


def _ceiling(site: Site) -> float:
    return math.inf if site.scale_ceiling is None else site.scale_ceiling


def _floor(site: Site) -> float:
    return 0.0 if site.scale_floor is None else site.scale_floor
