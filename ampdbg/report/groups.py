"""Which parameter groups overflowed: how often, since when, how badly, and in which step the fewest did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampdbg.diagnosis.skips import is_everywhere
from ampdbg.record.run import GroupOverflow, ParameterCounts, Record, Step


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
    hit = [step for step in record.steps if count_hit(step)]
    total = max(len(record.groups), max(map(count_hit, hit), default=0))
    reachable = _reachable(record, total)
    local = tuple(step for step in hit if not is_everywhere(count_hit(step), reachable, total))
    listed = [step for step in local if step.groups]
    return Overflows(
        total=total,
        everywhere=tuple(step for step in hit if is_everywhere(count_hit(step), reachable, total)),
        local=local,
        hits=group_hits(local),
        narrowest=min(listed, key=lambda step: (len(step.groups), step.step), default=None),
    )


def count_hit(step: Step) -> int:
    """How many groups had a non-finite gradient in this step, listed or not."""
    return len(step.groups) or step.groups_hit


def group_hits(steps: Sequence[Step]) -> tuple[GroupHits, ...]:
    """The groups that ``steps`` list, sorted by first step, then the most often, then their order in the model."""
    seen: dict[int, list[tuple[int, GroupOverflow]]] = {}
    for step in steps:
        for group in step.groups:
            seen.setdefault(group.index, []).append((step.step, group))
    hits = {index: _summarise(events) for index, events in seen.items()}
    return tuple(sorted(hits.values(), key=lambda hit: (hit.first, -hit.steps, hit.index)))


def group_name(name: str, index: int) -> str:
    """The name of a group, or its place where it has none."""
    return name or f"group {index}"


def spared_groups(record: Record, steps: Sequence[Step]) -> tuple[str, ...]:
    """The names of the groups that were finite in every one of ``steps``; none where no step lists its groups."""
    if not any(step.groups for step in steps):
        return ()
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
