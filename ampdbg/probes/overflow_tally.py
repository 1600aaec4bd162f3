"""How much of the overflowing groups the record keeps: everything at first, then totals, so that it stays small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampdbg.calibration import is_everywhere
from ampdbg.record.run import GroupOverflow, GroupTotal, ParameterCounts

DETAILED_STEPS = 50
"""So many unhealthy steps list their groups and parameters."""

DETAILED_PARAMETERS = 10_000
"""So many parameters are listed over all steps, about 2 MB of JSON; the first unhealthy step always is."""

NARROW = 20
"""A later step that hits fewer groups than any before, and at most so many, is listed too: it says most about where."""


class OverflowTally:
    """What was kept so far; feed it the overflowing groups of each unhealthy step in order."""

    def __init__(self) -> None:
        self.unlisted = 0
        self._totals: dict[int, GroupTotal] = {}
        self._steps = 0
        self._parameters = 0
        self._fewest = NARROW + 1

    @property
    def totals(self) -> tuple[GroupTotal, ...]:
        """The groups of the steps that are not listed, but for steps that hit (almost) every group."""
        return tuple(self._totals[index] for index in sorted(self._totals))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the record has to say about what it leaves out."""
        if not self.unlisted:
            return ()
        listed = self._steps - self.unlisted
        note = f"of {self._steps} steps with non-finite gradients only {listed} list their groups, to keep this small"
        return (note,)

    def kept(
        self, step: int, groups: Sequence[GroupOverflow], reachable: int, total: int
    ) -> tuple[tuple[GroupOverflow, ...], int]:
        """The groups that this step lists, and how many it hit where it lists none (else 0).

        Args:
            step: the number of the step.
            groups: its groups with a non-finite gradient.
            reachable: how many groups had a gradient at all.
            total: how many groups there are.
        """
        if not groups:
            return (), 0
        self._steps += 1
        if self._is_listed(groups):
            self._parameters += sum(len(group.parameters) for group in groups)
            self._fewest = min(self._fewest, len(groups))
            return tuple(groups), 0
        self.unlisted += 1
        if not is_everywhere(len(groups), reachable, total):
            for group in groups:
                known = self._totals.get(group.index)
                self._totals[group.index] = _first(step, group) if known is None else _added(known, group)
        return (), len(groups)

    def _is_listed(self, groups: Sequence[GroupOverflow]) -> bool:
        if self._parameters == 0 or len(groups) < self._fewest:
            return True
        size = sum(len(group.parameters) for group in groups)
        return self._steps <= DETAILED_STEPS and self._parameters + size <= DETAILED_PARAMETERS


def _first(step: int, group: GroupOverflow) -> GroupTotal:
    parameters = group.parameters
    return GroupTotal(
        index=group.index,
        name=group.name,
        steps=1,
        first=step,
        inf=sum(counts.inf for counts in parameters),
        nan=sum(counts.nan for counts in parameters),
        size=sum(counts.size for counts in parameters),
        worst=max(parameters, key=_share).name if parameters else "",
        parameters=len(parameters),
    )


def _added(known: GroupTotal, group: GroupOverflow) -> GroupTotal:
    this = _first(known.first, group)
    worst = this if _bad_share(this) > _bad_share(known) else known
    return replace(worst, steps=known.steps + 1)


def _share(counts: ParameterCounts) -> float:
    return (counts.inf + counts.nan) / counts.size if counts.size else 0.0


def _bad_share(total: GroupTotal) -> float:
    return (total.inf + total.nan) / total.size if total.size else 0.0
