"""The page of a comparison: what got worse, what got better, then and now side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ampdbg.diagnosis.comparison import Change, Comparison, narrowing
from ampdbg.diagnosis.producers import op_name
from ampdbg.diagnosis.ranges import Window
from ampdbg.levels import precision_of
from ampdbg.quantities import counted, listed, number, scale
from ampdbg.record.findings import Finding, place_of
from ampdbg.record.run import Record, Site

from . import view
from .view import line, more

FORMAT, VERSION = "ampdbg.comparison", 1

SHOWN = 4
"""The most rows of a table in a story (the brief form of a page)."""

THEN_AND_NOW = (view.Column("then", "number"), view.Column("now", "number"))


def page(compared: Comparison, then: str, now: str) -> view.Page:
    """Return the page of ``ampdbg compare``; the two records are named as they were typed."""
    return view.Page(
        _headline(compared),
        _sections(compared),
        (f"then: {then} · {_ran_on(compared.then)}", f"now: {now} · {_ran_on(compared.now)}", *_notes(compared)),
        story=_sections(compared, SHOWN),
    )


def data(compared: Comparison, then: str, now: str) -> dict[str, Any]:
    """Return the comparison as plain data."""

    def fields(one: object, *names: str) -> dict[str, object]:
        return {name: getattr(one, name) for name in names}

    finding, ends = ("code", "severity", "module", "op", "message"), ("floor", "ceiling")
    return {
        "format": FORMAT,
        "version": VERSION,
        "then": then,
        "now": now,
        "within": compared.within,
        "worse": compared.is_worse,
        "better": compared.reversed.has_lost,
        "appeared": [fields(one, *finding) for one in compared.appeared],
        "gone": [fields(one, *finding) for one in compared.reversed.appeared],
        "overflows": [
            fields(one.of, "phase", "module", "op") | fields(one, "then", "now") for one in compared.overflows
        ],
        "headroom_bits": [{"module": one.of, **fields(one, "then", "now")} for one in compared.headrooms],
        "loss_scales": [
            {"module": one.of, "then": fields(one.then, *ends), "now": fields(one.now, *ends)}
            for one in compared.windows
        ],
    }


def _headline(compared: Comparison) -> view.Headline:
    same = f", with the same {counted(len(compared.now.findings), 'finding')}" * bool(compared.now.findings)
    return view.first(
        (compared.is_worse, view.Headline("bad", f"Worse: {'; '.join(_worse(compared))}.")),
        (compared.reversed.has_lost, view.Headline("good", f"Better: {'; '.join(_better(compared.reversed))}.")),
        (True, view.Headline("good", f"Not worse, within {counted_bits(compared.within)}{same}.")),
    )


def counted_bits(bits: float) -> str:
    """Return ``1 bit`` or ``2.5 bits``."""
    return "1 bit" if bits == 1 else f"{number(bits)} bits"


def _worse(compared: Comparison) -> Iterator[str]:
    began = round(sum(one.lost for one in compared.began))
    yield from ["an error stops the run"] * compared.broke
    yield from _listed(compared.appeared, "appeared")
    yield from [f"{counted(began, 'more place')} would overflow"] * bool(began)
    for first in compared.tighter[:1]:
        others = len(compared.tighter) - 1
        also = f", and {counted(others, 'more module')} lost headroom" * bool(others)
        yield f"{view.module(first.of)} lost {counted_bits(round(first.lost, 1))} of headroom{also}"
    if compared.narrower is not None:
        yield f"the range of loss scales that work shrank by {counted_bits(round(compared.narrower.lost, 1))}"


def _better(back: Comparison) -> Iterator[str]:
    """Yield what got better, from the comparison the other way round."""
    ceased, won = round(sum(one.lost for one in back.began)), len(back.tighter)
    yield from _listed(back.appeared, "gone")
    yield from [f"{counted(ceased, 'fewer place')} would overflow"] * bool(ceased)
    yield from [f"{counted(won, 'module')} gained headroom"] * bool(won)
    yield from ["more loss scales work"] * (back.narrower is not None)


def _listed(findings: Sequence[Finding], what: str) -> list[str]:
    names = listed([" in ".join(filter(None, (one.code, one.module))) for one in findings], 3)
    return [f"{names} {what}"] * bool(names)


def _sections(compared: Comparison, most: int | None = None) -> tuple[view.Section, ...]:
    """Return all sections; with ``most`` only the first rows of what changed."""
    within, is_whole = compared.within, most is None
    error = compared.now.error.splitlines()[: not compared.then.error]
    headrooms = (one for one in compared.headrooms if is_whole or abs(one.lost) > within)
    held = [(_sign(one.lost, within), view.module(one.of), f"{one.then:.1f}", f"{one.now:.1f}") for one in headrooms]
    windows = (one for one in compared.windows if is_whole or max(one.lost, _won(one)) > within)
    then, now = _run(compared.then), _run(compared.now)
    runs = [("", name, then[name], now[name]) for name in then] * (
        is_whole or not (compared.appeared or compared.overflows)
    )
    bits = "Headroom of the forward pass, in bits: the doublings left to 65,504"
    return view.filled(
        view.Paragraph(tuple(line(text, tone="bad") for text in error)),
        view.Findings(compared.appeared, is_brief=not is_whole),
        _table("What would overflow", "where", list(map(_overflow_row, compared.overflows)), most),
        _table(bits, "module", held, most),
        _table("Loss scales that work", "module", [_window_row(one, within) for one in windows], most),
        _table("The runs", "", runs, None),
    )


Row = tuple[view.Cell, ...]


def _table(title: str, of: str, rows: Sequence[Row], most: int | None) -> view.Table:
    columns = (view.Column("", "sign"), view.Column(of), *THEN_AND_NOW)
    return view.Table(title, columns, tuple(rows[:most]), below=more(len(rows) - len(rows[:most])))


def _sign(lost: float, within: float) -> view.StyledLine:
    return line(view.Words("✗", "bad") if lost > within else view.Words("✓", "good") if -lost > within else "")


def _overflow_row(one: Change[Site, int]) -> Row:
    site = one.of
    parts = (view.module(site.module), "backward" * (site.phase == "backward"), op_name(site.op), place_of(site.source))
    return _sign(one.lost, 0), " · ".join(filter(None, parts)), f"{one.then:,}", f"{one.now:,}"


def _won(one: Change[str, Window]) -> float:
    return narrowing(one.now, one.then)


def _window_row(one: Change[str, Window], within: float) -> Row:
    lost = one.lost if one.lost > within else -_won(one)
    named = line(one.of or view.Words("the whole model", "strong"))
    return _sign(lost, within), named, *(_span(end.floor, end.ceiling) for end in (one.then, one.now))


def _span(floor: float, ceiling: float) -> str:
    low, high = "any" if floor == 0 else scale(floor), "any" if math.isinf(ceiling) else scale(ceiling)
    return "none" if floor > ceiling else f"{low} to {high}"


def _run(record: Record) -> dict[str, str]:
    steps = record.timelines[0].steps
    return {
        "verdict": record.verdict,
        "findings": f"{len(record.findings):,}",
        "steps": f"{record.steps_run:,}",
        "skipped": f"{record.steps_skipped:,}",
        "last loss": number(record.steps[-1].loss if record.steps else None),
        "last loss scale": scale(steps[-1].scale) if steps else "-",
    }


def _ran_on(record: Record) -> str:
    ran = record.environment
    return f"torch {ran.torch} · {ran.device}{', emulated' if ran.emulated else ''}"


MACHINE = ("device", "policy", "emulated")
"""The fields of an environment that change numbers."""


def _notes(compared: Comparison) -> Iterator[str]:
    """Yield why the two records may differ for another reason than their code."""
    then, now = compared.then, compared.now
    measured, ran = [bool(record.sites) for record in (then, now)], (then.environment, now.environment)
    which = ["now", "then"][measured[1]]
    differs = any(getattr(ran[0], name) != getattr(ran[1], name) for name in MACHINE)
    lengths = f"{counted(then.planned_steps, 'step')} then, {now.planned_steps:,} now"
    stopped = [name for name, record in (("then", then), ("now", now)) if record.interrupted]
    who = "both were" if len(stopped) > 1 else f"{''.join(stopped)} was"
    both = "Note: records of ampdbg ranges also hold headroom and the loss scales that work."
    one = f"Note: headroom and loss scales are not compared: they were not measured {which}."
    yield from view.every(
        (measured[0] != measured[1], one),
        (not any(measured), both),
        (then.planned_steps != now.planned_steps, f"Note: the planned length differs: {lengths}."),
        (stopped, f"Note: {who} interrupted."),
        (differs, "Note: the two ran on different devices or policies, which alone changes numbers."),
    )
    before, after = precision_of(then.config), precision_of(now.config)
    changed = [key for key in ("dtype", "level", "pins", "loss_scale") if before.get(key) != after.get(key)]
    if changed:
        yield f"Note: the configs differ in precision.{' and precision.'.join(changed)}."
