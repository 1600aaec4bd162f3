"""Which parameter groups overflowed: how often, since when, how badly, and in which step the fewest did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampdbg.record import GroupOverflow, ParameterCounts, Record, Step

FEW = 4
"""A model of so few groups is always told group by group."""


@dataclass(frozen=True)
class GroupHits:
    """One parameter group over the steps in which its gradients were non-finite.

    ``steps`` is how many, ``first`` the first of them. ``inf``, ``nan`` and ``size`` count elements in
    the worst one; ``worst`` names the parameter with the largest share there, ``parameters`` how many
    parameters of the group had any.
    """

    index: int
    name: str
    steps: int
    first: int
    inf: int
    nan: int
    size: int
    worst: str
    parameters: int


@dataclass(frozen=True)
class Overflows:
    """The steps with non-finite gradients, told apart by what they say.

    A step that hits (almost) every group says nothing about where; a ``local`` one does, and
    ``narrowest``, the local step with the fewest groups, says most.
    """

    total: int
    everywhere: tuple[Step, ...]
    local: tuple[Step, ...]
    hits: tuple[GroupHits, ...]
    narrowest: Step | None


def overflows(record: Record) -> Overflows:
    """Sorts the record's overflowing steps; ``hits`` is over the local steps, first and most often hit first."""
    hit = [step for step in record.steps if step.groups]
    total = max(len(record.groups), max((len(step.groups) for step in hit), default=0))
    enough = _reachable(record, total) - total // 10
    everywhere = tuple(step for step in hit if total > FEW and len(step.groups) >= enough)
    local = tuple(step for step in hit if step not in everywhere)
    return Overflows(
        total=total,
        everywhere=everywhere,
        local=local,
        hits=group_hits(local),
        narrowest=min(local, key=lambda step: (len(step.groups), step.step), default=None),
    )


def group_hits(steps: Sequence[Step]) -> tuple[GroupHits, ...]:
    """The groups hit in ``steps``, sorted by first step, then the most often, then their order in the model."""
    seen: dict[int, list[tuple[int, GroupOverflow]]] = {}
    for step in steps:
        for group in step.groups:
            seen.setdefault(group.index, []).append((step.step, group))
    hits = [_summarise(events) for events in seen.values()]
    return tuple(sorted(hits, key=lambda hit: (hit.first, -hit.steps, hit.index)))


def group_name(name: str, index: int) -> str:
    """The name of a group, or its place where it has none."""
    return name or f"group {index}"


def spared_groups(record: Record, steps: Sequence[Step]) -> tuple[str, ...]:
    """The names of the groups that were finite in every one of ``steps``."""
    hit = {group.index for step in steps for group in step.groups}
    return tuple(group_name(name, index) for index, name in enumerate(record.groups) if index not in hit)


def _reachable(record: Record, total: int) -> int:
    """How many groups can be hit at all: a parameter without a gradient never is."""
    untrained = set(record.unseen.parameters_without_gradient)
    return total - sum(name in untrained for name in record.groups)


def _summarise(events: list[tuple[int, GroupOverflow]]) -> GroupHits:
    first, group = events[0]
    worst = max((event for _, event in events), key=_bad_share)
    return GroupHits(
        index=group.index,
        name=group.name,
        steps=len(events),
        first=first,
        inf=sum(p.inf for p in worst.parameters),
        nan=sum(p.nan for p in worst.parameters),
        size=sum(p.size for p in worst.parameters),
        worst=max(worst.parameters, key=_parameter_share).name if worst.parameters else "",
        parameters=len(worst.parameters),
    )


def _bad_share(group: GroupOverflow) -> float:
    size = sum(p.size for p in group.parameters)
    return sum(p.inf + p.nan for p in group.parameters) / size if size else 0.0


def _parameter_share(parameter: ParameterCounts) -> float:
    return (parameter.inf + parameter.nan) / parameter.size if parameter.size else 0.0
