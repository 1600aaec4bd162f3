"""Comparison of two runs of one command: findings, overflows, headroom and loss scales, then and now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Generic, TypeVar

from ampdbg.diagnosis.ranges import Window, module_windows, window
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Site

LEAST_SCALE, MOST_SCALE = 1.0, 2.0**24
"""Loss scales outside this range are not compared. No training uses lower scales, and higher ones gain nothing (the
second is Apex's maximum)."""

PLACE = attrgetter("phase", "module", "op")
"""The place of a site. The line is left out, because lines move between versions of the code."""

FINDING = attrgetter("code", "module", "op", "parameter")
"""The key by which two findings are the same."""

Of = TypeVar("Of")
Compared = TypeVar("Compared")


@dataclass(frozen=True)
class Change(Generic[Of, Compared]):
    """A value ``of`` a place or a module, then and now. ``lost`` is how much worse it got, in bits, or in places for
    overflows. It is negative if it got better."""

    of: Of
    then: Compared
    now: Compared
    lost: float


@dataclass(frozen=True)
class Comparison:
    """Two records of one command. A change of at most ``within`` bits does not count."""

    then: Record
    now: Record
    within: float

    @property
    def has_ranges(self) -> bool:
        """True if both records have the measurements of ``ampdbg ranges``."""
        return bool(self.then.sites and self.now.sites)

    @cached_property
    def reversed(self) -> Comparison:
        """The comparison of the two records the other way round: what is worse in it has got better."""
        return Comparison(self.now, self.then, self.within)

    @cached_property
    def appeared(self) -> tuple[Finding, ...]:
        """The new independent findings, except information."""
        return tuple(_beyond(self.now, self.then))

    @cached_property
    def overflows(self) -> tuple[Change[Site, int], ...]:
        """The number of overflows that start at each place, then and now. The example site is from now, if possible."""
        if not self.has_ranges:
            return ()
        starts = [[site for site in record.sites if site.overflow == "starts"] for record in (self.then, self.now)]
        then, now = (Counter(map(PLACE, sites)) for sites in starts)
        example = {PLACE(site): site for sites in starts for site in reversed(sites)}
        both = ((site, then[place], now[place]) for place, site in example.items())
        return tuple(Change(site, before, after, after - before) for site, before, after in both)

    @cached_property
    def headrooms(self) -> tuple[Change[str, float], ...]:
        """The tightest headroom in each common module's forward pass, in bits; largest reduction first."""
        then, now = (_tightest(record.sites) for record in (self.then, self.now))
        both = ((module, then[module], bits) for module, bits in now.items() if module in then)
        return _most_lost(Change(module, before, after, before - after) for module, before, after in both)

    @cached_property
    def windows(self) -> tuple[Change[str, Window], ...]:
        """The usable loss scales of the whole model, named "", and of each common module; largest reduction first.
        ``lost`` is their :func:`narrowing`."""
        if not self.has_ranges:
            return ()
        then, now = ({one.module: one for one in module_windows(record.sites)} for record in (self.then, self.now))
        both = (_of_windows(module or "(root)", then[module], one) for module, one in now.items() if module in then)
        return _of_windows("", window(self.then.sites), window(self.now.sites)), *_most_lost(both)

    @property
    def began(self) -> tuple[Change[Site, int], ...]:
        """The places with more overflows than then."""
        return tuple(one for one in self.overflows if one.lost > 0)

    @property
    def tighter(self) -> tuple[Change[str, float], ...]:
        """The modules that lost more headroom than ``within``."""
        return tuple(one for one in self.headrooms if one.lost > self.within)

    @property
    def narrower(self) -> Change[str, Window] | None:
        """The change of the whole model's scales if it exceeds ``within``, else None. A scaler has only one scale."""
        return next((one for one in self.windows[:1] if one.lost > self.within), None)

    @property
    def broke(self) -> bool:
        """True if an error stops the run now and none did then."""
        return bool(self.now.error) and not self.then.error

    @property
    def is_worse(self) -> bool:
        """True if an error stops the run, or anything got worse by more than ``within``."""
        return self.broke or self.has_lost

    @property
    def has_lost(self) -> bool:
        """True if a finding is new, or a measurement is worse by more than ``within``."""
        return bool(self.appeared or self.began or self.tighter or self.narrower)


def _of_windows(module: str, then: Window, now: Window) -> Change[str, Window]:
    return Change(module, then, now, narrowing(then, now))


def narrowing(then: Window, now: Window) -> float:
    """Return by how many bits an end of a window moved inward. The other end may have moved outward."""
    ends = [[min(max(end, LEAST_SCALE), MOST_SCALE) for end in (one.floor, one.ceiling)] for one in (then, now)]
    (lower, higher), (low, high) = (map(math.log2, one) for one in ends)
    return max(low - lower, higher - high)


def _most_lost(changes: Iterable[Change[str, Compared]]) -> tuple[Change[str, Compared], ...]:
    return tuple(sorted(changes, key=lambda one: -one.lost))


def _beyond(one: Record, other: Record) -> Iterator[Finding]:
    """Yield the independent findings that the first record has more often than the second."""
    found, known = ([each for each in record.faults if each.root is None] for record in (one, other))
    left = Counter(map(FINDING, known))
    for finding in found:
        left[FINDING(finding)] -= 1
        if left[FINDING(finding)] < 0:
            yield finding


def _tightest(sites: Iterable[Site]) -> dict[str, float]:
    """Return the least headroom in each module's forward pass, without ops that output only zeros."""
    found: dict[str, float] = {}
    for site in sites:
        if site.phase == "forward" and math.isfinite(site.headroom_bits):
            found[site.module] = min(site.headroom_bits, found.get(site.module, math.inf))
    return found
