"""The parameter groups with non-finite gradients: how often, since when, how badly, and which step says most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampdbg.quantities import counted, listed, share
from ampdbg.record.run import GroupOverflow, ParameterCounts, Record, Step

from .view import Column, Line, Table, Words, line, more

MAX_GROUPS = 12

FEW_GROUPS = 4

COLUMNS = (
    Column("group"),
    Column("steps", "number"),
    Column("first", "number"),
    Column("inf", "number"),
    Column("NaN", "number"),
    Column("worst share", "number"),
)


@dataclass(frozen=True)
class GroupHits:
    """One parameter group over the steps in which its gradients were non-finite.

    ``steps`` is how many, ``first`` the first of them. ``inf``, ``nan`` and ``size`` count elements in
    the worst one; ``worst`` names the parameter with the largest share there.
    """

    index: int
    name: str
    steps: int
    first: int
    inf: int
    nan: int
    size: int
    worst: str


@dataclass(frozen=True)
class Overflows:
    """The steps with non-finite gradients, by what they say.

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
    hit = [step for step in record.steps if _hit(step)]
    total = max(len(record.groups), max(map(_hit, hit), default=0))
    untrained = set(record.unseen.parameters_without_gradient)
    reachable = total - sum(name in untrained for name in record.groups)
    local = tuple(step for step in hit if not _is_everywhere(_hit(step), reachable, total))
    listing = [step for step in local if step.groups]
    return Overflows(
        total=total,
        everywhere=tuple(step for step in hit if _is_everywhere(_hit(step), reachable, total)),
        local=local,
        hits=group_hits(local),
        narrowest=min(listing, key=lambda step: (len(step.groups), step.step), default=None),
    )


def _is_everywhere(hit: int, reachable: int, total: int) -> bool:
    """Whether a step with ``hit`` of the ``reachable`` groups, which have a gradient, hits (almost) all of them.

    The groups of a model that has few are always named one by one.
    """
    return total > FEW_GROUPS and hit >= reachable - total // 10


def _hit(step: Step) -> int:
    """How many groups had a non-finite gradient in this step, listed or not."""
    return len(step.groups) or step.groups_hit


def group_hits(steps: Sequence[Step]) -> tuple[GroupHits, ...]:
    """The groups that ``steps`` list, sorted by first step, then the most often, then their order in the model."""
    events: dict[int, list[tuple[int, GroupOverflow]]] = {}
    for step in steps:
        for group in step.groups:
            events.setdefault(group.index, []).append((step.step, group))
    return tuple(sorted(map(_hits, events.values()), key=lambda hit: (hit.first, -hit.steps, hit.index)))


def _hits(events: list[tuple[int, GroupOverflow]]) -> GroupHits:
    first, group = events[0]
    worst = max((event for _, event in events), key=lambda event: _bad_share(event.parameters))
    return GroupHits(
        index=group.index,
        name=group.name,
        steps=len(events),
        first=first,
        inf=sum(p.inf for p in worst.parameters),
        nan=sum(p.nan for p in worst.parameters),
        size=sum(p.size for p in worst.parameters),
        worst=max(worst.parameters, key=lambda p: _bad_share((p,))).name if worst.parameters else "",
    )


def _bad_share(parameters: Sequence[ParameterCounts]) -> float:
    size = sum(p.size for p in parameters)
    return sum(p.inf + p.nan for p in parameters) / size if size else 0.0


def _name(name: str, index: int) -> str:
    return name or f"group {index}"


# The section of a page


def group_table(record: Record) -> Table | None:
    """The groups as a table, the step with the fewest above it, and below it what hit all at once."""
    found = overflows(record)
    steps = len(found.everywhere) + len(found.local)
    if not steps:
        return None
    return Table(
        f"Non-finite gradients, in {steps:,} of {counted(len(record.steps), 'step')}",
        COLUMNS if found.hits else (),
        _rows(found),
        _narrowest(found),
        (*more(len(found.hits) - MAX_GROUPS, "group"), *_everywhere(found)),
    )


def _narrowest(found: Overflows) -> tuple[Line, ...]:
    """The step that localises best: few groups at once are near the cause, many are its wake."""
    step = found.narrowest
    if step is None or len(step.groups) >= min(MAX_GROUPS, len(found.hits)):
        return ()
    names = listed([_name(group.name, group.index) for group in step.groups])
    start = f"Step {step.step} hits the fewest groups, {len(step.groups)} of {found.total:,}: "
    return (line(start, Words(names, "strong")),)


def _rows(found: Overflows) -> tuple[tuple[str, ...], ...]:
    listing = sum(bool(step.groups) for step in found.local)
    return tuple(
        (
            _with_worst(hit),
            f"{hit.steps:,} of {listing:,}",
            str(hit.first),
            f"{hit.inf:,}",
            f"{hit.nan:,}",
            share(hit.inf + hit.nan, hit.size),
        )
        for hit in found.hits[:MAX_GROUPS]
    )


def _with_worst(hit: GroupHits) -> str:
    """The group, and the worst of its parameters unless that is the group's own name."""
    name = _name(hit.name, hit.index)
    if hit.worst in ("", name):
        return name
    return f"{name} ({hit.worst})"


def _everywhere(found: Overflows) -> tuple[Line, ...]:
    steps = found.everywhere
    if not steps:
        return ()
    which = "All" if all(_hit(step) == found.total for step in steps) else "Nearly all of"
    when = f"at once in {counted(len(steps), 'step')}, first at step {steps[0].step}"
    return (line(f"{which} {found.total:,} groups {when}{_lost_losses(steps)}."),)


def _lost_losses(steps: Sequence[Step]) -> str:
    lost = sum(not math.isfinite(step.loss) for step in steps)
    if not lost:
        return ""
    return "; the loss of each is non-finite too" if lost == len(steps) else f"; in {lost} of them the loss is too"
