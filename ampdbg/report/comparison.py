"""The page of a comparison: what got worse, what got better, then and now side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ampdbg.diagnosis.comparison import Comparison, Overflow, Tightness, Windows
from ampdbg.diagnosis.producers import op_name
from ampdbg.levels import precision_of
from ampdbg.quantities import counted, listed, number, scale
from ampdbg.record.findings import place_of
from ampdbg.record.run import Record, Site

from . import view
from .view import line, more

FORMAT, VERSION = "ampdbg.comparison", 1

SHOWN = 4
"""So many rows of a table are in the story."""

THEN_AND_NOW = (view.Column("then", "number"), view.Column("now", "number"))


def page(compared: Comparison, then: str, now: str) -> view.Page:
    """What ``ampdbg compare`` says of two records, which are named as they were typed."""
    return view.Page(
        _headline(compared),
        tuple(_sections(compared)),
        (f"then: {then} · {_ran_on(compared.then)}", f"now: {now} · {_ran_on(compared.now)}", *_notes(compared)),
        story=tuple(_sections(compared, SHOWN)),
    )


def data(compared: Comparison, then: str, now: str) -> dict[str, Any]:
    """The comparison as plain data."""

    def finding(one: Any) -> dict[str, object]:
        return {"code": one.code, "severity": one.severity, "module": one.module, "op": one.op, "message": one.message}

    return {
        "format": FORMAT,
        "version": VERSION,
        "then": then,
        "now": now,
        "within": compared.within,
        "worse": compared.is_worse,
        "better": compared.is_better,
        "appeared": [finding(one) for one in compared.appeared],
        "gone": [finding(one) for one in compared.gone],
        "overflows": [
            {"phase": one.site.phase, "module": one.site.module, "op": one.site.op, "then": one.then, "now": one.now}
            for one in compared.overflows
        ],
        "headroom_bits": [{"module": one.module, "then": one.then, "now": one.now} for one in compared.headrooms],
        "loss_scales": [
            {
                "module": one.module,
                "then": {"floor": one.then.floor, "ceiling": one.then.ceiling},
                "now": {"floor": one.now.floor, "ceiling": one.now.ceiling},
            }
            for one in compared.windows
        ],
    }


def _headline(compared: Comparison) -> view.Headline:
    if compared.is_worse:
        return view.Headline("bad", f"Worse: {'; '.join(_worse(compared))}.")
    if compared.is_better:
        return view.Headline("good", f"Better: {'; '.join(_better(compared))}.")
    found = counted(len(compared.now.findings), "finding")
    same = f", with the same {found}" if compared.now.findings else ""
    return view.Headline("good", f"Not worse, within {counted_bits(compared.within)}{same}.")


def counted_bits(bits: float) -> str:
    """``1 bit``, ``2.5 bits``."""
    return "1 bit" if bits == 1 else f"{number(bits)} bits"


def _worse(compared: Comparison) -> Iterator[str]:
    if compared.broke:
        yield "an error stops the run"
    if compared.appeared:
        yield f"{listed([_named(one.code, one.module) for one in compared.appeared], 3)} appeared"
    if compared.began:
        yield f"{counted(sum(one.now - one.then for one in compared.began), 'more place')} would overflow"
    if compared.tighter:
        first, *others = compared.tighter
        also = f", and {counted(len(others), 'more module')} lost headroom" if others else ""
        yield f"{view.module(first.module)} lost {counted_bits(round(first.lost, 1))} of headroom{also}"
    if compared.narrower is not None:
        yield f"the range of loss scales that work shrank by {counted_bits(round(compared.narrower.lost, 1))}"


def _better(compared: Comparison) -> Iterator[str]:
    if compared.gone:
        yield f"{listed([_named(one.code, one.module) for one in compared.gone], 3)} gone"
    if compared.ceased:
        yield f"{counted(sum(one.then - one.now for one in compared.ceased), 'fewer place')} would overflow"
    won = [one for one in compared.headrooms if -one.lost > compared.within]
    if won:
        yield f"{counted(len(won), 'module')} gained headroom"
    if any(one.won > compared.within for one in compared.windows[:1]):
        yield "more loss scales work"


def _named(code: str, module: str) -> str:
    return f"{code} in {module}" if module else code


def _sections(compared: Comparison, most: int | None = None) -> Iterator[view.Section]:
    """All, or where ``most`` is given the first rows of what changed."""
    if compared.now.error and not compared.then.error:
        yield view.Paragraph((line(compared.now.error.splitlines()[0], tone="bad"),))
    if compared.appeared:
        yield view.Findings(compared.appeared, is_brief=most is not None)
    if compared.overflows:
        yield _table("What would overflow", "where", list(map(_overflow_row, compared.overflows)), most)
    headrooms = [one for one in compared.headrooms if most is None or abs(one.lost) > compared.within]
    if headrooms:
        rows = [_headroom_row(one, compared.within) for one in headrooms]
        yield _table("Headroom of the forward pass, in bits: the doublings left to 65,504", "module", rows, most)
    windows = [one for one in compared.windows if most is None or max(one.lost, one.won) > compared.within]
    if windows:
        rows = [_window_row(one, compared.within) for one in windows]
        yield _table("Loss scales that work", "module", rows, most)
    if most is None or not (compared.appeared or compared.overflows):
        yield _table("The runs", "", _run_rows(compared), None)


Row = tuple[view.Cell, ...]


def _table(title: str, of: str, rows: Sequence[Row], most: int | None) -> view.Table:
    columns = (view.Column("", "sign"), view.Column(of), *THEN_AND_NOW)
    shown = rows if most is None else rows[:most]
    return view.Table(title, columns, tuple(shown), below=more(len(rows) - len(shown)))


def _sign(lost: float, within: float) -> view.StyledLine:
    return line(view.Words("✗", "bad") if lost > within else view.Words("✓", "good") if -lost > within else "")


def _overflow_row(one: Overflow) -> Row:
    return _sign(one.now - one.then, 0), _where(one.site), f"{one.then:,}", f"{one.now:,}"


def _where(site: Site) -> str:
    backward = "backward" if site.phase == "backward" else ""
    return " · ".join(filter(None, (view.module(site.module), backward, op_name(site.op), place_of(site.source))))


def _headroom_row(one: Tightness, within: float) -> Row:
    return _sign(one.lost, within), view.module(one.module), f"{one.then:.1f}", f"{one.now:.1f}"


def _window_row(one: Windows, within: float) -> Row:
    lost = one.lost if one.lost > within else -one.won
    ends = (_span(one.then.floor, one.then.ceiling), _span(one.now.floor, one.now.ceiling))
    return _sign(lost, within), line(one.module or view.Words("the whole model", "strong")), *ends


def _span(floor: float, ceiling: float) -> str:
    if floor > ceiling:
        return "none"
    low, high = "any" if floor == 0 else scale(floor), "any" if math.isinf(ceiling) else scale(ceiling)
    return f"{low} to {high}"


def _run_rows(compared: Comparison) -> list[Row]:
    then, now = _run(compared.then), _run(compared.now)
    return [("", name, then[name], now[name]) for name in then]


def _run(record: Record) -> dict[str, str]:
    steps = record.timelines[0].steps
    last = record.steps[-1] if record.steps else None
    return {
        "verdict": record.verdict,
        "findings": f"{len(record.findings):,}",
        "steps": f"{record.steps_run:,}",
        "skipped": f"{record.steps_skipped:,}",
        "last loss": number(last.loss if last else None),
        "last loss scale": scale(steps[-1].scale) if steps else "-",
    }


def _ran_on(record: Record) -> str:
    ran = record.environment
    return f"torch {ran.torch} · {ran.device}{', emulated' if ran.emulated else ''}"


def _notes(compared: Comparison) -> Iterator[str]:
    """What makes the two differ for another reason than their code."""
    then, now = compared.then, compared.now
    if bool(then.sites) != bool(now.sites):
        which = "now" if then.sites else "then"
        yield f"Note: headroom and loss scales are not compared: they were not measured {which}."
    elif not then.sites:
        yield "Note: records of ampdbg ranges also hold headroom and the loss scales that work."
    if then.planned_steps != now.planned_steps:
        yield (
            f"Note: the planned length differs: {counted(then.planned_steps, 'step')} then, {now.planned_steps:,} now."
        )
    if then.interrupted or now.interrupted:
        both = then.interrupted and now.interrupted
        yield f"Note: {'both were' if both else 'now was' if now.interrupted else 'then was'} interrupted."
    for name in ("device", "policy", "emulated"):
        if getattr(then.environment, name) != getattr(now.environment, name):
            yield "Note: the two ran on different devices or policies, which alone changes numbers."
            break
    before, after = precision_of(then.config), precision_of(now.config)
    changed = [key for key in ("dtype", "level", "pins", "loss_scale") if before.get(key) != after.get(key)]
    if changed:
        yield f"Note: the configs differ in precision.{' and precision.'.join(changed)}."
