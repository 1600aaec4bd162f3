"""Which loss scales a model can be trained at: each module's window, the whole model's, and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ampdbg.record.run import Site


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
    for site in _gradients(sites):
        by_module.setdefault(site.module, []).append(site)
    yield from (window(members, module) for module, members in by_module.items())


def window(sites: Iterable[Site], module: str = "") -> Window:
    """The scales at which every one of ``sites`` keeps its gradients: by default, read as the whole model's.

    Gradients that are nothing but rounding error may be lost without harm and raise no floor.
    """
    gradients = list(_gradients(sites))
    lowest = min(gradients, key=_ceiling, default=None)
    highest = max((site for site in gradients if not site.is_noise), key=_floor, default=None)
    if lowest is not None and math.isinf(_ceiling(lowest)):
        lowest = None
    if highest is not None and _floor(highest) == 0.0:
        highest = None
    return Window(
        module=module,
        floor=_floor(highest) if highest else 0.0,
        ceiling=_ceiling(lowest) if lowest else math.inf,
        lowest_ceiling=lowest,
        highest_floor=highest,
    )


def _gradients(sites: Iterable[Site]) -> Iterator[Site]:
    return (site for site in sites if site.scale_ceiling is not None and site.scale_floor is not None)


def _ceiling(site: Site) -> float:
    return math.inf if site.scale_ceiling is None else site.scale_ceiling


def _floor(site: Site) -> float:
    return 0.0 if site.scale_floor is None else site.scale_floor
