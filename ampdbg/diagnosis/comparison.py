"""Two runs of one command compared: what was found, what overflows, headroom and loss scales, then and now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from ampdbg.diagnosis.ranges import Window, module_windows, window
from ampdbg.record.findings import Finding, Phase
from ampdbg.record.run import Record, Site

LEAST_SCALE, MOST_SCALE = 1.0, 2.0**24
"""Loss scales beyond these are not compared: below the first nobody trains, and above the second no gain is left
(Apex's own most)."""

SitePlace = tuple[Phase, str, str]
"""Phase, module and op: lines move between two versions of a code."""


Of = TypeVar("Of")
Compared = TypeVar("Compared")


@dataclass(frozen=True)
class Change(Generic[Of, Compared]):
    """What is known ``of`` a place or a module, then and now: how much got worse, and how much better, in bits; of
    overflows in places. Negative where it got the other."""

    of: Of
    then: Compared
    now: Compared
    lost: float
    won: float


@dataclass(frozen=True)
class Comparison:
    """``then`` and ``now``, records of one command; a change of at most ``within`` bits is none."""

    then: Record
    now: Record
    within: float

    @property
    def has_ranges(self) -> bool:
        """Both hold what ``ampdbg ranges`` measures."""
        return bool(self.then.sites and self.now.sites)

    @cached_property
    def appeared(self) -> tuple[Finding, ...]:
        """Findings of now that then had not: those that stand for themselves, and are no mere information."""
        return tuple(_beyond(self.now, self.then))

    @cached_property
    def gone(self) -> tuple[Finding, ...]:
        """The findings of then that now has not."""
        return tuple(_beyond(self.then, self.now))

    @cached_property
    def overflows(self) -> tuple[Change[Site, int], ...]:
        """In how many places an overflow starts, then and now, by an example: of now, or else of then."""
        if not self.has_ranges:
            return ()
        starts = [[site for site in record.sites if site.overflow == "starts"] for record in (self.then, self.now)]
        then, now = (Counter(map(_place, sites)) for sites in starts)
        example = {_place(site): site for sites in starts for site in reversed(sites)}
        both = ((site, then[place], now[place]) for place, site in example.items())
        return tuple(Change(site, before, after, after - before, before - after) for site, before, after in both)

    @cached_property
    def headrooms(self) -> tuple[Change[str, float], ...]:
        """Of each module's forward pass that both have, in bits at its tightest: the one that lost most first."""
        then, now = (_tightest(record.sites) for record in (self.then, self.now))
        both = ((module, then[module], bits) for module, bits in now.items() if module in then)
        return _most_lost(
            Change(module, before, after, before - after, after - before) for module, before, after in both
        )

    @cached_property
    def windows(self) -> tuple[Change[str, Window], ...]:
        """The loss scales that work for the whole model, named "", and then for each module that both have, the one
        that lost most first: by how many bits an end came in, and one went out."""
        if not self.has_ranges:
            return ()
        then, now = ({one.module: one for one in module_windows(record.sites)} for record in (self.then, self.now))
        both = (_of_windows(module or "(root)", then[module], one) for module, one in now.items() if module in then)
        return _of_windows("", window(self.then.sites), window(self.now.sites)), *_most_lost(both)

    @property
    def began(self) -> tuple[Change[Site, int], ...]:
        """Where more overflows now."""
        return tuple(one for one in self.overflows if one.lost > 0)

    @property
    def ceased(self) -> tuple[Change[Site, int], ...]:
        """Where less overflows now."""
        return tuple(one for one in self.overflows if one.won > 0)

    @property
    def tighter(self) -> tuple[Change[str, float], ...]:
        """The modules that lost more headroom than is allowed."""
        return tuple(one for one in self.headrooms if one.lost > self.within)

    @property
    def narrower(self) -> Change[str, Window] | None:
        """The loss scales of the whole model, where they are fewer by more than is allowed: a scaler has but one."""
        return next((one for one in self.windows[:1] if one.lost > self.within), None)

    @property
    def broke(self) -> bool:
        """An error stops the run that did not stop it then."""
        return bool(self.now.error) and not self.then.error

    @property
    def is_worse(self) -> bool:
        """Anything got worse by more than is allowed."""
        return bool(self.broke or self.appeared or self.began or self.tighter or self.narrower)

    @property
    def is_better(self) -> bool:
        """Something got better, whatever got worse."""
        won = (*(one.won for one in self.headrooms), *(one.won for one in self.windows[:1]))
        return bool(self.gone or self.ceased) or max(won, default=0.0) > self.within


def _of_windows(module: str, then: Window, now: Window) -> Change[str, Window]:
    ends = [[min(max(end, LEAST_SCALE), MOST_SCALE) for end in (one.floor, one.ceiling)] for one in (then, now)]
    (lower, higher), (low, high) = (map(math.log2, one) for one in ends)
    return Change(module, then, now, max(low - lower, higher - high), max(lower - low, high - higher))


def _most_lost(changes: Iterable[Change[str, Compared]]) -> tuple[Change[str, Compared], ...]:
    return tuple(sorted(changes, key=lambda one: -one.lost))


def _beyond(one: Record, other: Record) -> Iterator[Finding]:
    """The findings of the first record that the second has not, or has fewer times."""
    left = Counter(map(_key, _counted(other)))
    for finding in _counted(one):
        if left[_key(finding)]:
            left[_key(finding)] -= 1
        else:
            yield finding


def _counted(record: Record) -> Iterator[Finding]:
    return (finding for finding in record.faults if finding.root is None)


def _key(finding: Finding) -> tuple[str, str, str, str]:
    return finding.code, finding.module, finding.op, finding.parameter


def _place(site: Site) -> SitePlace:
    return site.phase, site.module, site.op


def _tightest(sites: Iterable[Site]) -> dict[str, float]:
    """The least headroom in each module's forward pass; of nothing but zeros there is none to speak of."""
    found: dict[str, float] = {}
    for site in sites:
        if site.phase == "forward" and math.isfinite(site.headroom_bits):
            found[site.module] = min(site.headroom_bits, found.get(site.module, math.inf))
    return found
