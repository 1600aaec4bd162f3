"""The parameter groups with non-finite gradients as text: the telling step, a table, and what hit all at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from ampdbg.record.run import Record, Step

from . import quantities
from .groups import GroupHits, Overflows, group_name, spared_groups
from .layout import indented, table, title
from .quantities import counted

MAX_GROUPS = 12


def groups_text(record: Record, seen: Overflows) -> Iterator[RenderableType]:
    """The section on ``seen``, the overflows of ``record``; at least one."""
    steps = len(seen.everywhere) + len(seen.local)
    yield title(f"Non-finite gradients, in {steps} of {counted(len(record.steps), 'step')}")
    if seen.local:
        if seen.narrowest is not None and len(seen.narrowest.groups) < min(MAX_GROUPS, len(seen.hits)):
            yield _narrowest(seen.narrowest, seen.total)
        if seen.hits:
            yield _grouptable(seen)
        if len(seen.hits) > MAX_GROUPS:
            yield indented(Text(f"… and {len(seen.hits) - MAX_GROUPS} more groups (all in the record)", style="dim"))
    if seen.everywhere:
        yield _everywhere(record, seen)


def _narrowest(step: Step, total: int) -> RenderableType:
    """The step that localises best: few groups at once are near the cause, many are its wake."""
    names = quantities.listed(tuple(group_name(group.name, group.index) for group in step.groups))
    return indented(
        Text.assemble(f"Fewest at once, at step {step.step}: {len(step.groups)} of {total}: ", (names, "bold"))
    )


def _grouptable(seen: Overflows) -> RenderableType:
    rows = table("group", "steps", "first", "inf", "NaN", "worst share")
    listed = sum(bool(step.groups) for step in seen.local)
    for hit in seen.hits[:MAX_GROUPS]:
        rows.add_row(
            _group_name(hit),
            f"{hit.steps} of {listed}",
            str(hit.first),
            str(hit.inf),
            str(hit.nan),
            quantities.share(hit.inf + hit.nan, hit.size),
        )
    return indented(rows)


def _group_name(hit: GroupHits) -> str:
    """The group, and the worst of its parameters unless that is the group's own name."""
    name = group_name(hit.name, hit.index)
    if hit.worst in ("", name):
        return name
    others = f" +{hit.parameters - 1}" if hit.parameters > 1 else ""
    return f"{name} ({hit.worst}{others})"


def _everywhere(record: Record, seen: Overflows) -> RenderableType:
    steps = seen.everywhere
    spared = spared_groups(record, steps)
    which = f"All {seen.total} groups"
    if spared:
        which = f"{seen.total - len(spared)} of {seen.total} groups, all but {quantities.listed(spared)},"
    when = f"at once in {counted(len(steps), 'step')}, first at step {steps[0].step}"
    return indented(Text(f"{which} {when}{_lost_losses(steps)}."))


def _lost_losses(steps: tuple[Step, ...]) -> str:
    lost = sum(not math.isfinite(step.loss) for step in steps)
    if not lost:
        return ""
    return "; the loss itself is non-finite there" if lost == len(steps) else f"; in {lost} of them the loss is too"
